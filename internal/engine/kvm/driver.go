package kvm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/limit"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/engine/warm"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/programs"
)

// Name is the engine's name in the API and in manifests.
const Name = "kvm"

// Artifact kinds and formats this engine writes.
const (
	kindMemory = memimage.KindMemory
	kindDisk   = "disk"
	kindDevice = "device"

	formatLayer = "forkd-layer-1"
	formatCow   = "cow1"
	formatState = "forkd-vmstate-1"
)

// Config is what a Driver needs.
type Config struct {
	// Dir belongs to the driver; it exists.
	Dir string
	// LibexecDir is where the monitor is unpacked; it may be shared with other programs.
	LibexecDir string
	// Program is forkd-vmm, a static program.
	Program []byte
	// Installation qualifies process names, so that several data directories on
	// one host do not touch each other's machines. [a-z0-9]+.
	Installation string
	// ResidentMaxBytes bounds the memory files that are kept for forks and that no
	// machine maps at the moment; 0 means no bound.
	ResidentMaxBytes int64
	// Blank is how many processes are prepared for each of the shapes used last; 0 means none.
	Blank int
	// Log receives what happens in the background; nil drops it.
	Log func(format string, args ...any)
}

// Driver implements engine.Driver, engine.Pooler and the optional powers of both.
type Driver struct {
	cfg     Config
	program string // path of forkd-vmm
	build   string // digest of it
	kvm     *os.File
	empty   *os.File // the root directory of monitors
	speed   linux.KVMSpeed
	tscKHz  uint64
	bootID  string
	isRoot  bool

	images *memimage.Images
	pool   *warm.Pool
	blanks *blanks
	limits limit.Limiter

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	group  sync.WaitGroup

	mu sync.Mutex
	// +checklocks:mu
	machines map[string]*Machine
	// +checklocks:mu
	uids map[int]bool // of blank processes
}

var (
	_ engine.Driver = (*Driver)(nil)
	_ engine.Pooler = (*Driver)(nil)
)

// New returns a driver for this host. It fails with ErrUnavailable if /dev/kvm is missing or
// emulates kernel code.
func New(ctx context.Context, cfg Config) (*Driver, error) {
	if cfg.Log == nil {
		cfg.Log = func(string, ...any) {}
	}
	d := &Driver{
		cfg: cfg, isRoot: os.Geteuid() == 0, images: memimage.NewImages(cfg.ResidentMaxBytes), limits: limit.New(cfg.Installation),
		machines: map[string]*Machine{}, uids: map[int]bool{},
	}
	var err error
	if d.bootID, err = linux.BootID(); err != nil {
		return nil, fmt.Errorf("start kvm engine: %w", err)
	}
	if d.tscKHz, err = linux.TSCkHz(); err != nil {
		return nil, fmt.Errorf("start kvm engine: %w", err)
	}
	// Inherited by every monitor: huge pages would make a fork own 2 MiB for each
	// byte it touches. The daemon itself does not care.
	if err := linux.SetTHPDisable(); err != nil {
		return nil, fmt.Errorf("start kvm engine: %w", err)
	}
	if err := d.look(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start kvm engine: %w", errdefs.As(errdefs.ErrUnavailable, err)), d.closeFiles())
	}
	if err := d.openDirs(); err != nil {
		return nil, errors.Join(fmt.Errorf("start kvm engine: %w", err), d.closeFiles())
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	if err := d.endBlanks(ctx); err != nil {
		d.cancel()
		return nil, errors.Join(fmt.Errorf("start kvm engine: %w", err), d.closeFiles())
	}
	d.pool = warm.New(d.restoreAhead, cfg.Log)
	d.blanks = newBlanks(d, cfg.Blank)
	return d, nil
}

func (d *Driver) openDirs() error {
	for _, name := range []string{claimsDir, blankDir} {
		if err := os.MkdirAll(filepath.Join(d.cfg.Dir, name), 0o711); err != nil {
			return err
		}
	}
	empty := filepath.Join(d.cfg.Dir, "empty")
	if err := os.MkdirAll(empty, 0o555); err != nil {
		return err
	}
	var err error
	d.empty, err = os.Open(empty)
	return err
}

// minMIPS is the least speed of kernel code at which machines are of use: a stock kernel boots in
// some hundred million instructions. Hosts that emulate each instruction reach 1.4; emulated
// AMD-V (test/nested) 20 and more, real processors thousands.
const minMIPS = 4

// look finds out whether this host runs machines, and prepares for it.
func (d *Driver) look(ctx context.Context) error {
	if len(d.cfg.Program) == 0 {
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "forkd-vmm is not part of this build"), "build forkd with `make build`")
	}
	var err error
	if d.speed, err = measure(ctx); err != nil {
		return err
	}
	if d.speed.MIPS() < minMIPS {
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "%v: guests would take minutes to boot", d.speed), "use the engine qemu or gvisor here")
	}
	if d.kvm, err = os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		return err
	}
	d.build = programs.Digest(d.cfg.Program)
	d.program, err = unpack(d.cfg.LibexecDir, d.cfg.Program)
	return err
}

// measure returns the best of some looks at /dev/kvm: a busy host makes one look bad, and nothing
// makes one look good.
func measure(ctx context.Context) (best linux.KVMSpeed, err error) {
	const looks = 3
	for range looks {
		speed, err := linux.KVMProbe(ctx)
		if err != nil {
			return speed, err
		}
		if speed.MIPS() > best.MIPS() {
			best = speed
		}
		if best.MIPS() >= minMIPS {
			break
		}
	}
	return best, nil
}

// Name returns "kvm".
func (d *Driver) Name() string { return Name }

// minMemoryLimitMiB is what an idle fork of a small guest needs, with room for its first
// answer.
const minMemoryLimitMiB = 64

// Probe describes the engine on this host.
func (d *Driver) Probe(context.Context) engine.Probe {
	p := engine.Probe{
		Version: "forkd-vmm", Accelerator: "kvm", Isolation: engine.IsolationHardware, SharesMemory: true,
		MinMemoryLimitMiB: minMemoryLimitMiB,
	}
	p.Version += " " + d.build[len("sha256-"):][:12]
	p.Available, p.Reason = true, "our own monitor on KVM: "+d.speed.String()
	p.Confinement, p.Lost = d.confinement()
	return p
}

// Forget drops the memory file and the prepared machines of a snapshot.
func (d *Driver) Forget(snapshotID string) {
	d.pool.Drop(snapshotID)
	d.images.Forget(snapshotID)
	for _, m := range d.all() {
		if err := m.forsake(snapshotID); err != nil {
			d.cfg.Log("forget %s in %s: %v", snapshotID, m.rec.ID, err)
		}
	}
}

func (d *Driver) all() []*Machine {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]*Machine, 0, len(d.machines))
	for _, m := range d.machines {
		out = append(out, m)
	}
	return out
}

// Close ends the pools and the driver's goroutines. Machines go on.
func (d *Driver) Close() error {
	d.pool.Close()
	d.blanks.close()
	d.cancel()
	d.group.Wait()
	for _, m := range d.all() {
		m.disconnect()
	}
	d.images.Close()
	return d.closeFiles()
}

func (d *Driver) closeFiles() error {
	var errs []error
	for _, f := range []*os.File{d.kvm, d.empty} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// track registers a machine and starts watching its process.
func (d *Driver) track(m *Machine) {
	d.mu.Lock()
	d.machines[m.rec.ID] = m
	delete(d.uids, m.rec.UID)
	d.mu.Unlock()
	d.group.Go(func() { m.watch(d.ctx) })
}

func (d *Driver) ended(m *Machine) {
	d.mu.Lock()
	if d.machines[m.rec.ID] == m {
		delete(d.machines, m.rec.ID)
	}
	d.mu.Unlock()
	d.images.Trim(d.mapped)
}

// mapped counts the machines that map the memory file of each snapshot.
func (d *Driver) mapped() map[string]int {
	out := map[string]int{}
	for _, m := range d.all() {
		out[m.rec.MappedID]++
	}
	return out
}

// Uids of machines are taken from a range that no distribution hands out
// (systemd.io/UIDS-GIDS: 0x60000000 and up are unassigned).
const (
	firstUID = 0x60000000
	uidCount = 0x1f000000
)

// pickUID returns a uid that no living process of this driver has. It is taken until the
// process ends (freeUID) or becomes a machine.
func (d *Driver) pickUID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	for {
		uid := firstUID + rand.IntN(uidCount)
		taken := d.uids[uid]
		for _, m := range d.machines {
			taken = taken || m.rec.UID == uid
		}
		if !taken {
			d.uids[uid] = true
			return uid
		}
	}
}

func (d *Driver) freeUID(uid int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.uids, uid)
}
