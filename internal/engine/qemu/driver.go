package qemu

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/limit"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/engine/warm"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/linux"
)

// Name is the engine's name in the API and in manifests.
const Name = "qemu"

// Artifact kinds and formats this engine writes.
const (
	kindMemory = memimage.KindMemory
	kindDisk   = "disk"
	kindDevice = "device"

	formatLayer = "forkd-layer-1"
	formatQcow2 = "qcow2"
	formatXen   = "qemu-xen"
)

// Config is what a Driver needs.
type Config struct {
	// Dir belongs to the driver; it exists.
	Dir string
	// Installation qualifies process names, so that several data directories on
	// one host do not touch each other's machines. [a-z0-9]+.
	Installation string
	// Binary is qemu-system-x86_64; "" looks it up in PATH.
	Binary string
	// ResidentMaxBytes bounds the memory images that are kept for forks and that no
	// machine maps at the moment; 0 means no bound.
	ResidentMaxBytes int64
	// Log receives what happens in the background; nil drops it.
	Log func(format string, args ...any)
}

// Driver implements engine.Driver and engine.Pooler.
type Driver struct {
	cfg      Config
	binary   string
	version  string
	tscKHz   uint64
	bootID   string
	emptyDir string
	isRoot   bool

	images *memimage.Images
	pool   *warm.Pool
	arenas arenas
	limits limit.Limiter
	// merging is held by the merge of disk layers under way.
	merging turn

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

// New returns a driver for this host. It fails with ErrUnavailable if QEMU is
// missing or too old.
func New(ctx context.Context, cfg Config) (*Driver, error) {
	binary, version, err := findQEMU(ctx, cfg.Binary)
	if err != nil {
		return nil, err
	}
	tsc, err := linux.TSCkHz()
	if err != nil {
		return nil, fmt.Errorf("start qemu engine: %w", err)
	}
	bootID, err := linux.BootID()
	if err != nil {
		return nil, fmt.Errorf("start qemu engine: %w", err)
	}
	empty := filepath.Join(cfg.Dir, "empty")
	if err := os.MkdirAll(empty, 0o555); err != nil {
		return nil, fmt.Errorf("start qemu engine: %w", err)
	}
	// Inherited by every QEMU: huge pages would make a fork own 2 MiB for each
	// byte it touches. The daemon itself does not care.
	if err := linux.SetTHPDisable(); err != nil {
		return nil, fmt.Errorf("start qemu engine: %w", err)
	}
	if cfg.Log == nil {
		cfg.Log = func(string, ...any) {}
	}
	d := &Driver{
		cfg: cfg, binary: binary, version: version, tscKHz: tsc, bootID: bootID,
		emptyDir: empty, isRoot: os.Geteuid() == 0,
		images:   memimage.NewImages(cfg.ResidentMaxBytes),
		machines: map[string]*Machine{},
		merging:  newTurn(),
	}
	if err := removeMerges(cfg.Dir); err != nil {
		return nil, fmt.Errorf("start qemu engine: %w", err)
	}
	d.limits = limit.New(cfg.Installation)
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.pool = warm.New(d.restoreAhead, cfg.Log)
	return d, nil
}

// Name returns "qemu".
func (d *Driver) Name() string { return Name }

// minMajor is the oldest QEMU whose microvm has ACPI and whose `-incoming defer`
// with sealed memory was tested.
const minMajor = 7

func findQEMU(ctx context.Context, binary string) (path, version string, err error) {
	if binary == "" {
		binary = "qemu-system-x86_64"
	}
	const hint = "install it with: apt-get install --no-install-recommends qemu-system-x86"
	path, err = exec.LookPath(binary)
	if err != nil {
		return "", "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "%s is not installed", binary), hint)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return "", "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "run %s --version: %v", path, err), hint)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	version = strings.TrimSpace(strings.TrimPrefix(first, "QEMU emulator version "))
	var major int
	if _, err := fmt.Sscanf(version, "%d.", &major); err != nil || major < minMajor {
		return "", "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "%s has version %q, %d.0 or newer is needed", path, version, minMajor), hint)
	}
	return path, version, nil
}

// Probe describes the engine on this host.
func (d *Driver) Probe(context.Context) engine.Probe {
	c := confinement{root: d.isRoot}
	lost := c.lost()
	applied := c.applied()
	if l := d.limits.Lost(); l != "" {
		lost = append(lost, l)
	} else {
		applied = append(applied, "cgroup limits on memory and processes")
	}
	return engine.Probe{
		Available: true, Reason: "QEMU " + d.version + " with TCG (emulation)", Version: "QEMU " + d.version,
		Accelerator: "tcg", Isolation: engine.IsolationEmulated, SharesMemory: true,
		Confinement: applied, Lost: lost, MinMemoryLimitMiB: minMemoryLimitMiB,
	}
}

// Compat describes what state captured here needs.
func (d *Driver) Compat(root engine.Root) (engine.Compat, error) {
	digest, err := kernelDigest(root.Kernel)
	if err != nil {
		return engine.Compat{}, err
	}
	return engine.Compat{Engine: Name, EngineBuild: d.version, Accelerator: "tcg", KernelDigest: digest, CPU: "tcg-max", TSCkHz: d.tscKHz}, nil
}

// maxTSCDeviationPPM is how far the host's TSC rate may be from the recorded one.
const maxTSCDeviationPPM = 500

// CheckCompat says why state recorded as c cannot be restored here.
func (d *Driver) CheckCompat(c engine.Compat) error {
	switch {
	case c.Engine != Name:
		return errdefs.New(errdefs.ErrIncompatible, "it was captured by engine %q, this is %q", c.Engine, Name)
	case c.EngineBuild != d.version:
		return errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "it was captured by QEMU %s, this host has %s", c.EngineBuild, d.version),
			"make the snapshot again on this host")
	case c.Accelerator != "tcg":
		return errdefs.New(errdefs.ErrIncompatible, "it was captured with accelerator %q, this engine uses tcg", c.Accelerator)
	}
	diff := int64(c.TSCkHz) - int64(d.tscKHz)
	if diff < 0 {
		diff = -diff
	}
	if diff*1_000_000 > int64(d.tscKHz)*maxTSCDeviationPPM {
		return errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "it was captured at a TSC rate of %d kHz, this host has %d kHz", c.TSCkHz, d.tscKHz),
			"make the snapshot again on this host")
	}
	return nil
}

// Forget drops the resident image and the prepared machines of a snapshot.
func (d *Driver) Forget(snapshotID string) {
	d.pool.Drop(snapshotID)
	d.images.Forget(snapshotID)
	d.mu.Lock()
	machines := make([]*Machine, 0, len(d.machines))
	for _, m := range d.machines {
		machines = append(machines, m)
	}
	d.mu.Unlock()
	for _, m := range machines {
		if err := m.forsake(snapshotID); err != nil {
			d.cfg.Log("forget %s in %s: %v", snapshotID, m.rec.ID, err)
		}
	}
}

// Close ends the pool and the driver's goroutines. Machines go on.
func (d *Driver) Close() error {
	d.pool.Close()
	d.cancel()
	d.group.Wait()
	d.mu.Lock()
	machines := make([]*Machine, 0, len(d.machines))
	for _, m := range d.machines {
		machines = append(machines, m)
	}
	d.mu.Unlock()
	for _, m := range machines {
		m.closeConnections()
	}
	d.images.Close()
	d.arenas.drop()
	return nil
}

// track registers a machine and starts watching its process.
func (d *Driver) track(m *Machine) {
	d.mu.Lock()
	d.machines[m.rec.ID] = m
	d.mu.Unlock()
	d.group.Go(func() { m.watch(d.ctx) })
	d.group.Go(func() { m.keepGoing(d.ctx) })
}

func (d *Driver) ended(m *Machine) {
	d.mu.Lock()
	if d.machines[m.rec.ID] == m {
		delete(d.machines, m.rec.ID)
	}
	d.mu.Unlock()
	d.images.Trim(d.mapped)
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

// processName is the -name of a machine's process.
func (d *Driver) processName(id string) string {
	return "forkd-" + d.cfg.Installation + "-" + id
}

// Adopt takes over a running machine of an earlier daemon.
func (d *Driver) Adopt(ctx context.Context, id, dir string) (engine.Machine, error) {
	rec, err := readRecord(dir)
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, err)
	}
	if rec.ID != id || rec.BootID != d.bootID {
		return nil, errdefs.New(errdefs.ErrNotFound, "adopt %s: its record is of another boot or machine", id)
	}
	handle, err := linux.Process{PID: rec.PID, Start: rec.Start}.Open()
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, err)
	}
	m := &Machine{d: d, rec: rec, dir: dir, proc: handle, done: make(chan struct{}), left: make(chan struct{}), full: make(chan struct{}, 1), op: newTurn(), adopted: true}
	d.adoptMemory(rec)
	d.track(m)
	if err := m.command(ctx, "query-status", nil, nil); err != nil {
		return nil, errors.Join(fmt.Errorf("adopt %s: %w", id, err), m.Kill(ctx))
	}
	return m, nil
}

// adoptMemory reopens the resident image that a living machine maps, so that new
// forks share memory with old ones.
func (d *Driver) adoptMemory(rec record) {
	if rec.MappedID == "" {
		return
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/fd/%d", rec.PID, memoryFD))
	if err != nil {
		d.cfg.Log("memory image of %s is not reusable from %s: %v", rec.MappedID, rec.ID, err)
		return
	}
	st, err := f.Stat()
	if err != nil || st.Size() != int64(rec.Shape.MemoryMiB)<<20 || !linux.IsImmutable(f) {
		_ = f.Close()
		return
	}
	d.images.Put(rec.MappedID, f)
}

// Orphans lists the machines of this installation that have a process.
func (d *Driver) Orphans(context.Context) ([]string, error) {
	prefix := d.processName("")
	var ids []string
	err := eachProcess(func(_ int, args []string) {
		// Any user of the host can give a process any name.
		if id, ok := strings.CutPrefix(nameArg(args), prefix); ok && ident.KindOf(id) == ident.Sandbox {
			ids = append(ids, id)
		}
	})
	return ids, err
}

// Reap ends whatever process of machine id there is.
func (d *Driver) Reap(ctx context.Context, id, _ string) error {
	name := d.processName(id)
	var victims []linux.Process
	err := eachProcess(func(pid int, args []string) {
		if nameArg(args) != name {
			return
		}
		if p, err := linux.Identify(pid); err == nil {
			victims = append(victims, p)
		}
	})
	if err != nil {
		return fmt.Errorf("reap %s: %w", id, err)
	}
	for _, p := range victims {
		if err := p.Kill(9); err != nil {
			return fmt.Errorf("reap %s: %w", id, err)
		}
		if err := p.Wait(ctx); err != nil {
			return fmt.Errorf("reap %s: %w", id, err)
		}
	}
	return d.limits.Free(ctx, id)
}

// eachProcess calls fn with the command line of every process of the host.
func eachProcess(fn func(pid int, args []string)) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		var pid int
		if _, err := fmt.Sscanf(e.Name(), "%d", &pid); err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil || len(b) == 0 {
			continue
		}
		fn(pid, strings.Split(strings.TrimRight(string(b), "\x00"), "\x00"))
	}
	return nil
}

// nameArg returns the -name of a QEMU command line, or "".
func nameArg(args []string) string {
	if len(args) == 0 || !strings.Contains(filepath.Base(args[0]), "qemu-system") {
		return ""
	}
	for i, a := range args[:len(args)-1] {
		if a == "-name" {
			return args[i+1]
		}
	}
	return ""
}
