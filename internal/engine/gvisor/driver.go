package gvisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/warm"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// Name is the engine's name in the API and in manifests.
const Name = "gvisor"

// platform is how runsc intercepts system calls: the only one of its platforms that
// needs no virtualization and can be restored.
const platform = "systrap"

// Config is what a Driver needs.
type Config struct {
	// Dir belongs to the driver; it exists.
	Dir string
	// Installation qualifies control groups, so that several data directories on
	// one host do not touch each other's machines. [a-z0-9]+.
	Installation string
	// Runsc is the program, as FindRunsc returned it.
	Runsc string
	// Agent is the static forkd-agent program.
	Agent []byte
	// Log receives what happens in the background; nil drops it.
	Log func(format string, args ...any)
}

// Driver implements engine.Driver and engine.Pooler.
type Driver struct {
	cfg     Config
	version string
	bootID  string
	// extraFlags are those of this program's version.
	extraFlags []string
	isRoot     bool
	runDir     string // runsc's --root
	agents     string // one directory per agent program, by digest, see keepAgent
	stage      string // where a sandbox that is being made finds it; "": in its own place
	agent      string // path of the agent that new machines boot with
	limits     limiter
	pool       *warm.Pool

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu sync.Mutex
	// +checklocks:mu
	machines map[string]*Machine
}

var (
	_ engine.Driver = (*Driver)(nil)
	_ engine.Pooler = (*Driver)(nil)
)

// New returns a driver for this host. It fails with ErrUnavailable if runsc is
// missing, broken or too old.
func New(cfg Config) (engine.Driver, error) {
	version, err := checkRunsc(cfg.Runsc)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (engine.Driver, error) {
		return nil, fmt.Errorf("start gvisor engine: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), versionPatience)
	defer cancel()
	extra, err := findExtraFlags(ctx, cfg.Runsc)
	if err != nil {
		return nil, err
	}
	bootID, err := linux.BootID()
	if err != nil {
		return fail(err)
	}
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return fail(err)
	}
	if len(cfg.Agent) == 0 {
		return fail(errdefs.New(errdefs.ErrInvalid, "no agent program was given"))
	}
	if cfg.Log == nil {
		cfg.Log = func(string, ...any) {}
	}
	d := &Driver{
		cfg: cfg, version: version, extraFlags: extra, bootID: bootID, isRoot: os.Geteuid() == 0,
		runDir: filepath.Join(cfg.Dir, "run"), agents: filepath.Join(cfg.Dir, "agents"),
		limits: newLimiter(cfg.Installation), machines: map[string]*Machine{},
	}
	if d.isRoot {
		d.stage = stageFor(cfg.Dir, cfg.Runsc)
	}
	for _, dir := range []string{d.runDir, d.agents} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fail(err)
		}
	}
	if d.agent, err = d.keepAgent(cfg.Agent); err != nil {
		return fail(err)
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.pool = warm.New(d.blank, cfg.Log)
	return d, nil
}

// stageFor returns an existing directory on which the directory of an agent program
// can be laid, in a mount namespace of runsc's own, without hiding anything it needs.
// The user that a sandbox's root is on the host has no way through our directories.
func stageFor(needed ...string) string {
	for _, dir := range []string{"/mnt", "/srv", "/media", "/opt"} {
		hides := slices.ContainsFunc(needed, func(path string) bool { return strings.HasPrefix(path, dir+"/") })
		if info, err := os.Stat(dir); err == nil && info.IsDir() && !hides {
			return dir
		}
	}
	return ""
}

// keepAgent writes an agent program by its digest and returns its path. Above its
// directory there is an empty one beside it, the root of sandboxes without an image.
func (d *Driver) keepAgent(program []byte) (string, error) {
	sum := sha256.Sum256(program)
	base := filepath.Join(d.agents, hex.EncodeToString(sum[:16]))
	if err := os.MkdirAll(filepath.Join(base, emptyRoot), 0o755); err != nil {
		return "", err
	}
	dir := filepath.Join(base, agentHome)
	path := filepath.Join(dir, agentFile)
	if info, err := os.Stat(path); err == nil && info.Size() == int64(len(program)) {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.CreateTemp(dir, ".agent-")
	if err != nil {
		return "", err
	}
	defer os.Remove(tmp.Name()) // nothing is there any more once it is in its place
	_, err = tmp.Write(program)
	if err = errors.Join(err, tmp.Chmod(0o755), tmp.Close()); err != nil {
		return "", fmt.Errorf("write agent program: %w", err)
	}
	return path, os.Rename(tmp.Name(), path)
}

// Name returns "gvisor".
func (d *Driver) Name() string { return Name }

// Probe describes the engine on this host.
func (d *Driver) Probe(context.Context) engine.Probe {
	applied := []string{"a user-space kernel between sandbox and host", "seccomp", "empty root", "own mount, ipc, uts and network namespace without interfaces", "no_new_privs"}
	var lost []string
	if d.isRoot {
		applied = append(applied, "own uid per machine in a user namespace of its own")
	} else {
		applied = append(applied, "own user namespace per machine")
		lost = append(lost, "own uid per machine (needs root): sandboxes run as the user of the daemon")
	}
	if l := d.limits.lost(); l != "" {
		lost = append(lost, l)
	} else {
		applied = append(applied, "cgroup limits on memory and processes")
	}
	return engine.Probe{
		Available: true, Reason: "runsc " + d.version + " with " + platform + " (user-space kernel)", Version: "runsc " + d.version,
		Accelerator: platform, Isolation: engine.IsolationUserKernel, SharesMemory: false,
		Confinement: applied, Lost: lost, MinMemoryLimitMiB: minMemoryLimitMiB,
	}
}

// Compat describes what state captured here needs.
func (d *Driver) Compat(engine.Root) (engine.Compat, error) {
	return engine.Compat{Engine: Name, EngineBuild: d.version, Accelerator: platform}, nil
}

// CheckCompat says why state recorded as c cannot be restored here.
func (d *Driver) CheckCompat(c engine.Compat) error {
	switch {
	case c.Engine != Name:
		return errdefs.New(errdefs.ErrIncompatible, "it was captured by engine %q, this is %q", c.Engine, Name)
	case c.EngineBuild != d.version:
		return errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "it was captured by runsc %s, this host has %s", c.EngineBuild, d.version),
			"make the snapshot again on this host")
	case c.Accelerator != platform:
		return errdefs.New(errdefs.ErrIncompatible, "it was captured on platform %q, this engine uses %s", c.Accelerator, platform)
	}
	return nil
}

// Forget drops the prepared machines of a snapshot, and it as a parent.
func (d *Driver) Forget(snapshotID string) {
	d.pool.Drop(snapshotID)
	for _, m := range d.all() {
		if err := m.forsake(snapshotID); err != nil {
			d.cfg.Log("forget %s in %s: %v", snapshotID, m.rec.ID, err)
		}
	}
}

func (d *Driver) all() []*Machine {
	d.mu.Lock()
	defer d.mu.Unlock()
	machines := make([]*Machine, 0, len(d.machines))
	for _, m := range d.machines {
		machines = append(machines, m)
	}
	return machines
}

// Close ends the pool and the driver's goroutines. Machines go on.
func (d *Driver) Close() error {
	d.pool.Close()
	d.cancel()
	d.group.Wait()
	for _, m := range d.all() {
		m.closeConnections()
	}
	// Newer runsc keeps an empty network namespace mounted here for all sandboxes.
	_ = unix.Unmount(filepath.Join(d.runDir, "null-netns"), unix.MNT_DETACH)
	return nil
}

// track registers a machine and starts watching its processes.
func (d *Driver) track(m *Machine) {
	d.mu.Lock()
	d.machines[m.rec.ID] = m
	d.mu.Unlock()
	d.group.Go(func() { m.watch(d.ctx) })
	d.group.Go(func() { m.watchGofer(d.ctx) })
	d.group.Go(func() { m.console.fill(d.ctx) })
}

func (d *Driver) ended(m *Machine) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.machines[m.rec.ID] == m {
		delete(d.machines, m.rec.ID)
	}
}

// Uids of machines are taken from a range that no distribution hands out
// (systemd.io/UIDS-GIDS: 0x60000000 and up are unassigned).
const (
	firstUID = 0x60000000
	uidCount = 0x1f000000
)

// pickUID returns a uid that no living machine of this driver has.
func (d *Driver) pickUID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		uid := firstUID + rand.IntN(uidCount)
		taken := false
		for _, m := range d.machines {
			taken = taken || m.rec.UID == uid
		}
		if !taken {
			return uid
		}
	}
}
