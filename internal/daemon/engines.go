package daemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/doctor"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/gvisor"
	"forkd.dev/forkd/internal/engine/kvm"
	"forkd.dev/forkd/internal/engine/qemu"
	"forkd.dev/forkd/internal/engine/selection"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/programs"
)

// engineEntry is an engine of this version.
type engineEntry struct {
	name string
	// ready: the conformance and end-to-end suites pass on it, so that auto may choose
	// it. The others must be asked for by name.
	ready bool
	// open starts the driver. ErrUnavailable: it cannot run on this host.
	open func(ctx context.Context, s engineSetup) (engine.Driver, error)
	// prove shows that a driver that opened works, or says why not; nil: opening proves it.
	prove func(ctx context.Context, s engineSetup, d engine.Driver) error
}

// engineSetup is what every engine is started with.
type engineSetup struct {
	dataDir          string // of the daemon, to find programs in
	dir              string // of the driver; it exists
	libexec          string // for programs that we carry
	installation     string
	residentMaxBytes int64
	logf             func(string, ...any)
}

// registry lists the engines. It is the one place that says which there are and
// which of them auto may choose.
func registry() []engineEntry {
	return []engineEntry{
		{name: kvm.Name, open: openKVM},
		{name: gvisor.Name, open: openGVisor, prove: proveGVisor},
		{name: qemu.Name, ready: true, open: openQEMU},
	}
}

// blankMonitors is how many processes of the kvm engine wait for a machine of each shape.
const blankMonitors = 4

func openKVM(ctx context.Context, s engineSetup) (engine.Driver, error) {
	monitor, err := programs.Monitor()
	if err != nil {
		return nil, err
	}
	return kvm.New(ctx, kvm.Config{
		Dir: s.dir, LibexecDir: s.libexec, Program: monitor, Installation: s.installation,
		ResidentMaxBytes: s.residentMaxBytes, Blank: blankMonitors, Log: s.logf,
	})
}

func openGVisor(_ context.Context, s engineSetup) (engine.Driver, error) {
	runsc, _, err := gvisor.FindRunsc(s.dataDir)
	if err != nil {
		return nil, err
	}
	agent, err := programs.Agent()
	if err != nil {
		return nil, err
	}
	return gvisor.New(gvisor.Config{Dir: s.dir, Installation: s.installation, Runsc: runsc, Agent: agent, Log: s.logf})
}

func openQEMU(ctx context.Context, s engineSetup) (engine.Driver, error) {
	return qemu.New(ctx, qemu.Config{Dir: s.dir, Installation: s.installation, ResidentMaxBytes: s.residentMaxBytes, Log: s.logf})
}

// engines is what a daemon knows of the engines of this version.
type engines struct {
	entries []engineEntry
	dataDir string
	// speed measures /dev/kvm; nil is the real measurement.
	speed func(ctx context.Context) selection.Speed
}

func newEngines(dataDir string) *engines {
	return &engines{entries: registry(), dataDir: dataDir, speed: measureKVM}
}

func measureKVM(ctx context.Context) selection.Speed {
	speed, err := linux.KVMProbe(ctx)
	return selection.Speed{KVM: speed, Err: err}
}

func (e *engines) find(name string) (engineEntry, error) {
	var names []string
	for _, entry := range e.entries {
		if entry.name == name {
			return entry, nil
		}
		names = append(names, entry.name)
	}
	return engineEntry{}, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "there is no engine %.40q", name),
		"use auto or one of: %s", strings.Join(names, ", "))
}

// dir is the directory of an engine in the data directory.
func (e *engines) dir(name string) string { return filepath.Join(e.dataDir, "engine", name) }

// open starts an engine in the data directory.
func (e *engines) open(ctx context.Context, name string, s engineSetup) (engine.Driver, error) {
	entry, err := e.find(name)
	if err != nil {
		return nil, err
	}
	s.dataDir, s.dir, s.libexec = e.dataDir, e.dir(name), filepath.Join(e.dataDir, "libexec")
	if err := os.MkdirAll(s.dir, 0o711); err != nil {
		return nil, fmt.Errorf("create engine directory: %w", err)
	}
	d, err := entry.open(ctx, s)
	if err != nil {
		return nil, fmt.Errorf("start engine %s: %w", name, err)
	}
	return d, nil
}

// probe looks at an engine in a directory of its own: doctor must work beside a
// running daemon and before there is a data directory.
func (e *engines) probe(ctx context.Context, entry engineEntry) engine.Probe {
	dir, err := os.MkdirTemp("", "forkd-probe-")
	if err != nil {
		return engine.Probe{Reason: err.Error(), Remedy: "make room in the directory for temporary files"}
	}
	defer os.RemoveAll(dir)
	// As below a data directory: machines have uids of their own.
	if err := os.Chmod(dir, 0o711); err != nil {
		return failedProbe(err)
	}
	s := engineSetup{dataDir: e.dataDir, dir: dir, libexec: filepath.Join(dir, "libexec"), installation: "probe", logf: func(string, ...any) {}}
	d, err := entry.open(ctx, s)
	if err != nil {
		return failedProbe(err)
	}
	defer d.Close()
	p := d.Probe(ctx)
	if p.Available && entry.prove != nil {
		if err := entry.prove(ctx, s, d); err != nil {
			failed := failedProbe(err)
			failed.Version, failed.Accelerator, failed.Isolation = p.Version, p.Accelerator, p.Isolation
			return failed
		}
	}
	return p
}

func failedProbe(err error) engine.Probe {
	return engine.Probe{Reason: strings.ReplaceAll(err.Error(), "\n", "; "), Remedy: orElse(errdefs.Hint(err), "go on with another engine")}
}

// probeAll looks at every engine.
func (e *engines) probeAll(ctx context.Context) []doctor.Engine {
	var out []doctor.Engine
	for _, entry := range e.entries {
		out = append(out, doctor.Engine{Name: entry.name, Ready: entry.ready, Probe: e.probe(ctx, entry)})
	}
	return out
}

// choose finds what auto means here. An engine is probed only if it matters.
func (e *engines) choose(ctx context.Context) (string, string, error) {
	var candidates []selection.Candidate
	for _, entry := range e.entries {
		candidates = append(candidates, selection.Candidate{
			Name: entry.name, Ready: entry.ready, Probe: func() engine.Probe { return e.probe(ctx, entry) },
		})
	}
	// The measurement takes a tenth of a second; it decides on kvm alone.
	speed := selection.Speed{Unknown: true}
	if kvm, err := e.find(selection.KVM); err == nil && kvm.ready {
		speed = e.speed(ctx)
	}
	c := selection.Choose(speed, candidates)
	if ctx.Err() != nil {
		return "", "", ctx.Err()
	}
	if c.Engine == "" {
		return "", "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "no engine works here: %s", c.Reason), "%s", orElse(c.Remedy, "see what is missing with: forkd doctor"))
	}
	return c.Engine, c.Reason, nil
}

func orElse(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// pick decides which engine a daemon runs. inUse are the engines of sandboxes that
// run in the data directory: auto goes on with theirs, so that they survive a version
// whose auto means another one, and any other engine is refused.
func (e *engines) pick(ctx context.Context, asked string, inUse map[string]int) (name, reason string, err error) {
	if asked == "" {
		asked = selection.Auto
	}
	if asked != selection.Auto {
		if _, err := e.find(asked); err != nil {
			return "", "", err
		}
		name, reason = asked, "it was asked for"
	}
	var running []string
	for engine := range inUse {
		running = append(running, engine)
	}
	slices.Sort(running)
	if asked == selection.Auto && len(running) == 1 {
		if _, err := e.find(running[0]); err == nil {
			return running[0], "sandboxes of it are running", nil
		}
	}
	for _, other := range running {
		if other == name {
			continue
		}
		return "", "", errdefs.WithHint(
			errdefs.New(errdefs.ErrConflict, "%d sandboxes of engine %s run on the data directory %s, and a daemon has one engine", inUse[other], other, e.dataDir),
			"start the daemon with --engine %s; to change, end them first there with: forkd kill --all", other)
	}
	if name != "" {
		return name, reason, nil
	}
	return e.choose(ctx)
}
