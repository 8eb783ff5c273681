package fake

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// Name is the engine's name in the API and in manifests.
const Name = "fake"

// Config is what a Driver needs.
type Config struct {
	// Name is the engine's; "" means [Name].
	Name string
	// Registry is the host; nil means one of its own.
	Registry *Registry
	// Installation qualifies machines, as in other engines.
	Installation string
	// Isolation is what Probe says; "" means "user-kernel".
	Isolation engine.Isolation
	// Build is the version in compatibility records; "" means "1".
	Build string
	// Fault is called at each step (see the Op constants) with the machine's id; an
	// error fails the step. nil never fails.
	Fault func(op Op, id string) error
	// Guest says how the guest of a new or adopted machine misbehaves; nil: not at all.
	Guest func(id string) GuestFaults
}

// Op is a step at which a fault can be scripted.
type Op string

// The steps, in the order in which a life takes them.
const (
	OpBoot    Op = "boot"
	OpRestore Op = "restore" // before there is a machine
	OpLoad    Op = "load"    // the machine exists, its state is not loaded
	OpDial    Op = "dial"
	OpResume  Op = "resume"
	OpPause   Op = "pause"
	OpCapture Op = "capture" // while the guest is stopped
	OpWrite   Op = "write"   // some artifacts are written
	OpAdopt   Op = "adopt"
	OpKill    Op = "kill"
	OpLimit   Op = "limit"
	OpReap    Op = "reap"
	OpOrphans Op = "orphans"
)

// ErrKilled as a fault stands for the death of the daemon at that step: the driver
// undoes nothing, as it could not any more.
var ErrKilled = errors.New("the daemon was killed")

// GuestFaults says how a guest misbehaves.
type GuestFaults struct {
	HangHello bool // never answers a new connection
	NoPython  bool // the warm runner cannot start
	// DieAfter ends the machine in the n-th call to its agent; 0 never.
	DieAfter int
	// Hold, if it returns a channel, makes an agent call wait until that is closed.
	Hold func(call string) <-chan struct{}
}

// Driver implements engine.Driver and engine.Pooler.
type Driver struct {
	cfg  Config
	pool pool

	mu sync.Mutex
	// +checklocks:mu
	closed bool
}

var (
	_ engine.Driver  = (*Driver)(nil)
	_ engine.Pooler  = (*Driver)(nil)
	_ engine.Limiter = (*Driver)(nil)

	_ engine.ColdBooter = (*Driver)(nil)
)

// New returns a driver.
func New(cfg Config) *Driver {
	if cfg.Name == "" {
		cfg.Name = Name
	}
	if cfg.Registry == nil {
		cfg.Registry = NewRegistry()
	}
	if cfg.Isolation == "" {
		cfg.Isolation = engine.IsolationUserKernel
	}
	if cfg.Build == "" {
		cfg.Build = "1"
	}
	d := &Driver{cfg: cfg}
	d.pool.targets = map[string]*target{}
	return d
}

// Name returns "fake", unless Config says otherwise.
func (d *Driver) Name() string { return d.cfg.Name }

// Probe describes the engine.
func (d *Driver) Probe(context.Context) engine.Probe {
	return engine.Probe{
		Available: true, Reason: "scripted guests in this process", Version: "fake " + d.cfg.Build,
		Accelerator: "none", Isolation: d.cfg.Isolation, SharesMemory: true, Lost: []string{"everything: it runs nothing"},
	}
}

// Compat describes this build. A root without a kernel has no kernel digest.
func (d *Driver) Compat(root engine.Root) (engine.Compat, error) {
	c := engine.Compat{Engine: d.cfg.Name, EngineBuild: d.cfg.Build, Accelerator: "none"}
	if root.Kernel == "" {
		return c, nil
	}
	b, err := os.ReadFile(root.Kernel)
	if err != nil {
		return c, fmt.Errorf("digest kernel: %w", classify(err))
	}
	sum := sha256.Sum256(b)
	c.KernelDigest = "sha256:" + hex.EncodeToString(sum[:])
	return c, nil
}

// CheckCompat compares engine, build and accelerator.
func (d *Driver) CheckCompat(c engine.Compat) error {
	if c.Engine != d.cfg.Name || c.EngineBuild != d.cfg.Build || c.Accelerator != "none" {
		return errdefs.New(errdefs.ErrIncompatible, "it was captured by engine %s %s (%s), this is %s %s", c.Engine, c.EngineBuild, c.Accelerator, d.cfg.Name, d.cfg.Build)
	}
	return nil
}

func (d *Driver) fault(op Op, id string) error {
	if d.cfg.Fault == nil {
		return nil
	}
	return d.cfg.Fault(op, id)
}

func (d *Driver) guestFaults(id string) GuestFaults {
	if d.cfg.Guest == nil {
		return GuestFaults{}
	}
	return d.cfg.Guest(id)
}

func (d *Driver) checkOpen(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errdefs.New(errdefs.ErrUnavailable, "the engine is closed")
	}
	return nil
}

// Boot starts a guest with empty memory and disk.
func (d *Driver) Boot(ctx context.Context, spec engine.Spec) (engine.Machine, error) {
	m, err := d.boot(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	return m, nil
}

func (d *Driver) boot(ctx context.Context, spec engine.Spec) (*Machine, error) {
	if err := d.checkOpen(ctx); err != nil {
		return nil, err
	}
	if err := d.fault(OpBoot, spec.ID); err != nil {
		return nil, err
	}
	if _, err := os.Stat(spec.Root.Disk); err != nil {
		return nil, fmt.Errorf("open root file system: %w", classify(err))
	}
	m, err := d.start(spec, "", newContent(time.Now()))
	if err != nil {
		return nil, err
	}
	return m, m.p.run(goOn)
}

// BootFrom starts a guest with empty memory and the disk of a state.
func (d *Driver) BootFrom(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	err := d.checkOpen(ctx)
	if err == nil {
		err = d.fault(OpBoot, spec.ID)
	}
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	if len(chain) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "boot %s: no state given", spec.ID)
	}
	old, err := readChain(chain, spec.Shape)
	if err != nil {
		return nil, fmt.Errorf("boot %s from %s: %w", spec.ID, chain[len(chain)-1].ID, err)
	}
	c := newContent(time.Now())
	c.Disk = old.Disk
	m, err := d.start(spec, "", c)
	if err == nil {
		err = m.p.run(goOn)
	}
	if err != nil {
		return nil, fmt.Errorf("boot %s: %w", spec.ID, err)
	}
	return m, nil
}

// Restore makes a stopped guest of the last state of chain.
func (d *Driver) Restore(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	if len(chain) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "restore %s: no state given", spec.ID)
	}
	m, err := d.restore(ctx, spec, chain)
	if err != nil {
		return nil, fmt.Errorf("restore %s from %s: %w", spec.ID, chain[len(chain)-1].ID, err)
	}
	return m, nil
}

func (d *Driver) restore(ctx context.Context, spec engine.Spec, chain []engine.State) (*Machine, error) {
	if err := d.checkOpen(ctx); err != nil {
		return nil, err
	}
	if err := d.fault(OpRestore, spec.ID); err != nil {
		return nil, err
	}
	c, err := readChain(chain, spec.Shape)
	if err != nil {
		return nil, err
	}
	m, err := d.start(spec, chain[len(chain)-1].ID, c)
	if err != nil {
		return nil, err
	}
	err = d.fault(OpLoad, spec.ID)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		if !errors.Is(err, ErrKilled) {
			m.p.end("its state was not loaded")
		}
		return nil, err
	}
	return m, nil
}

// recordFile is what Adopt finds a machine by.
const recordFile = "machine.json"

type record struct {
	ID  string `json:"id"`
	PID int    `json:"pid"`
}

// start makes a stopped machine.
func (d *Driver) start(spec engine.Spec, mapped string, c content) (*Machine, error) {
	p, err := d.cfg.Registry.start(d.cfg.Installation, spec.ID, spec.Shape, mapped, c, d.guestFaults(spec.ID))
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.limits = spec.Limits
	p.mu.Unlock()
	b, err := json.Marshal(record{ID: spec.ID, PID: p.pid})
	if err == nil {
		err = os.WriteFile(filepath.Join(spec.Dir, recordFile), b, 0o600)
	}
	if err != nil {
		p.end("its record was not written")
		return nil, fmt.Errorf("write machine record: %w", classify(err))
	}
	return &Machine{d: d, p: p}, nil
}

// Adopt takes over a machine that a driver of the same installation started.
func (d *Driver) Adopt(ctx context.Context, id, dir string) (engine.Machine, error) {
	if err := d.checkOpen(ctx); err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, err)
	}
	if err := d.fault(OpAdopt, id); err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, err)
	}
	b, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err != nil {
		return nil, fmt.Errorf("adopt %s: %w", id, classify(err))
	}
	var rec record
	if err := json.Unmarshal(b, &rec); err != nil {
		return nil, errdefs.New(errdefs.ErrCorrupt, "adopt %s: its record: %v", id, err)
	}
	p := d.cfg.Registry.find(d.cfg.Installation, id)
	if p == nil || rec.ID != id || rec.PID != p.pid {
		return nil, errdefs.New(errdefs.ErrNotFound, "adopt %s: its process is gone", id)
	}
	return &Machine{d: d, p: p}, nil
}

// Reap ends machine id if there is one.
func (d *Driver) Reap(ctx context.Context, id, _ string) error {
	if err := d.fault(OpReap, id); err != nil {
		return fmt.Errorf("reap %s: %w", id, err)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("reap %s: %w", id, err)
	}
	if p := d.cfg.Registry.find(d.cfg.Installation, id); p != nil {
		p.end("killed")
	}
	return nil
}

// Limit notes the limits of a machine.
func (d *Driver) Limit(ctx context.Context, id string, limits engine.Limits) error {
	if err := errors.Join(ctx.Err(), d.fault(OpLimit, id)); err != nil {
		return fmt.Errorf("limit %s: %w", id, err)
	}
	p := d.cfg.Registry.find(d.cfg.Installation, id)
	if p == nil {
		return errdefs.New(errdefs.ErrNotFound, "limit %s: there is no such machine", id)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.limits = limits
	return nil
}

// Orphans lists the machines of this installation.
func (d *Driver) Orphans(context.Context) ([]string, error) {
	if err := d.fault(OpOrphans, ""); err != nil {
		return nil, fmt.Errorf("list machines: %w", err)
	}
	r := d.cfg.Registry
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []string
	for k := range r.processes {
		if k.installation == d.cfg.Installation {
			ids = append(ids, k.id)
		}
	}
	return ids, nil
}

// Forget ends the prepared machines of a snapshot.
func (d *Driver) Forget(snapshotID string) {
	d.pool.drop(snapshotID)
	for _, p := range d.cfg.Registry.all(d.cfg.Installation) {
		p.forsake(snapshotID)
	}
}

// Close ends the pool. Machines go on.
func (d *Driver) Close() error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.pool.close()
	return nil
}

func classify(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.As(errdefs.ErrNotFound, err)
	case errors.Is(err, fs.ErrPermission):
		return errdefs.As(errdefs.ErrPermission, err)
	}
	return err
}
