package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"forkd.dev/forkd/internal/buildnet"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// ImageStore is what a Service needs of *image.Store, which says what the methods do.
type ImageStore interface {
	Get(ref string) (image.Image, error)
	List() ([]image.Image, error)
	Root(ctx context.Context, id string) (engine.Root, error)
	Build(ctx context.Context, spec image.BuildSpec, progress image.Progress) (image.Image, error)
	Remove(ctx context.Context, id string) error
}

// KernelStore is what a Service needs of *image.Store for kernels that users bring.
type KernelStore interface {
	Kernels(ctx context.Context) ([]image.NamedKernel, error)
	AddKernel(ctx context.Context, name string, archive io.Reader) (image.NamedKernel, error)
	RemoveKernel(ctx context.Context, name string) error
}

// Config is what a Service works with. The service owns none of it but Dir.
type Config struct {
	Dir    string // <data>/sandboxes: one directory for each machine
	Engine engine.Driver
	// LogDir keeps the logs of builds; "" keeps them only while a build runs.
	LogDir  string
	Images  ImageStore
	Kernels KernelStore // nil: there are none but Debian's
	Store   *snapshot.Store
	Journal *metadata.DB
	// AgentBuild names the agent that new machines get; built-ins with another one are
	// made anew. "" does not look.
	AgentBuild string
	Connect    ConnectFunc
	// BuildNet returns how builds reach package registries; nil: they do not.
	BuildNet func() buildnet.Settings
	// Session, if set, marks all sandboxes as belonging to a private daemon: they
	// end with it, and the next daemon ends what it finds of them.
	Session string
	// MemoryBudgetMiB is what all machines together may occupy of the host's memory;
	// 0 means 80 % of it.
	MemoryBudgetMiB int
	// Settle is how long the guest of a built-in is left alone before its capture; 0
	// means 7 s, negative not at all.
	Settle time.Duration
	// MaxSandboxes bounds living sandboxes; 0 means DefaultMaxSandboxes.
	MaxSandboxes int
	// MinFreeBytes is how much of the disk stays free: what would store something is
	// refused below. 0 means DefaultMinFreeBytes, negative nothing.
	MinFreeBytes int64
	// PoolSize is how many prepared processes are kept for each snapshot in use.
	PoolSize int
	Log      func(format string, args ...any)
}

// DefaultMaxSandboxes bounds living sandboxes of one daemon.
const DefaultMaxSandboxes = 2000

// DefaultMinFreeBytes of the disk stay free.
const DefaultMinFreeBytes = 1 << 30

// Service is the state machine over sandboxes, snapshots and images. Its methods
// may be called concurrently.
//
// Lock order: Service.mu, then entry.mu. Neither is held during I/O.
type Service struct {
	cfg      Config
	restores *semaphore.Weighted // restores under way; waiters are served in order
	warm     warmPools
	spares   spares
	builds   flights // built-ins being made
	logs     buildLogs

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	group  sync.WaitGroup // watchers
	ending sync.WaitGroup // machines that rollbacks replaced

	closing context.Context // ends when Close begins
	stop    context.CancelFunc
	calls   sync.WaitGroup // forks and snapshots under way

	mu sync.Mutex
	// +checklocks:mu
	entries map[string]*entry
	// +checklocks:mu
	names map[string]string // name -> id of living sandboxes
	// +checklocks:mu
	queue []*waiter // calls that wait for room, in order
	// +checklocks:mu
	reserved int // sandboxes admitted but not yet registered
	// +checklocks:mu
	reservedMiB int // what they are expected to need
	// +checklocks:mu
	pools []*plan // snapshots with prepared processes, least recently used first
	// +checklocks:mu
	blank map[string]int // snapshot id -> size of its blank pool, where it is not the default
	// +checklocks:mu
	prepared map[string]string // machine id -> snapshot id, of what the engine's pool was given
	// +checklocks:mu
	building map[string]int // image id -> builds from it under way; -1: it is being removed
	// +checklocks:mu
	closed bool
}

// New returns a service that has taken over what an earlier daemon left: running
// sandboxes are adopted, everything half-made is removed.
func New(ctx context.Context, cfg Config) (*Service, error) {
	if cfg.Settle == 0 {
		cfg.Settle = settleGuest
	}
	if cfg.MaxSandboxes == 0 {
		cfg.MaxSandboxes = DefaultMaxSandboxes
	}
	if cfg.MinFreeBytes == 0 {
		cfg.MinFreeBytes = DefaultMinFreeBytes
	}
	if cfg.Log == nil {
		cfg.Log = func(string, ...any) {}
	}
	if err := os.MkdirAll(cfg.Dir, 0o711); err != nil {
		return nil, fmt.Errorf("create sandbox directory: %w", err)
	}
	s := &Service{
		cfg:      cfg,
		restores: semaphore.NewWeighted(int64(2 * runtime.NumCPU())),
		entries:  map[string]*entry{},
		names:    map[string]string{},
		blank:    map[string]int{},
		prepared: map[string]string{}, building: map[string]int{},
	}
	s.closing, s.stop = context.WithCancel(context.Background())
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.warm.init()
	s.logs.dir = cfg.LogDir
	if err := s.recover(ctx); err != nil {
		s.stop()
		s.leave(s.known())
		return nil, fmt.Errorf("recover sandboxes: %w", err)
	}
	if err := s.recoverWarm(ctx); err != nil {
		s.stop()
		s.leave(s.known())
		return nil, err
	}
	s.group.Go(func() { s.fillWarm(s.closing) })
	s.group.Go(func() { s.sweep(s.closing) })
	s.group.Go(func() { s.keepSchedules(s.closing) })
	return s, nil
}

// Close ends forks and snapshots under way, prepared machines and connections.
// Sandboxes go on, unless the service has a session: then they end.
func (s *Service) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.stop()
	s.builds.close()
	s.calls.Wait()
	s.dropPools()
	s.endSpares(s.spares.shut())
	entries := s.known()
	var errs []error
	if s.cfg.Session != "" {
		for _, e := range entries {
			if !e.snapshot().State.living() {
				continue // its reason stays readable
			}
			if err := s.end(ctx, e, "the private daemon ended"); err != nil {
				errs = append(errs, err)
			}
		}
	}
	s.leave(entries)
	return errors.Join(errs...)
}

func (s *Service) known() []*entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.entries))
}

// leave ends watchers and connections; the machines go on.
func (s *Service) leave(entries []*entry) {
	s.cancel()
	for _, e := range entries {
		if e.link != nil {
			e.link.close()
		}
	}
	s.group.Wait()
}

// begin admits a call that makes something. Its context also ends when the service
// closes, which waits for done.
func (s *Service) begin(ctx context.Context) (_ context.Context, done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, nil, errClosed()
	}
	s.calls.Add(1)
	ctx, cancel := context.WithCancel(ctx)
	forget := context.AfterFunc(s.closing, cancel)
	return ctx, func() {
		forget()
		cancel()
		s.calls.Done()
	}, nil
}

func errClosed() error { return errdefs.New(errdefs.ErrUnavailable, "the daemon is shutting down") }

// machineDir is the directory of a machine; its name is its id.
func (s *Service) machineDir(id string) string { return filepath.Join(s.cfg.Dir, id) }

// newSpec creates the directory of a new machine and returns its spec.
func (s *Service) newSpec(id string, shape engine.Shape, root engine.Root, memoryLimitMiB int) (engine.Spec, error) {
	dir := s.machineDir(id)
	if err := os.Mkdir(dir, 0o711); err != nil {
		return engine.Spec{}, fmt.Errorf("create directory of sandbox: %w", err)
	}
	return engine.Spec{ID: id, Dir: dir, Shape: shape, Root: root, Limits: engine.Limits{MemoryMiB: memoryLimitMiB}}, nil
}

// discard ends whatever there is of a machine and removes its directory. It works
// on its own time: the caller's context may be the reason for it.
func (s *Service) discard(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	dir := s.machineDir(id)
	if err := s.cfg.Engine.Reap(ctx, id, dir); err != nil {
		return fmt.Errorf("remove sandbox %s: %w", id, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove sandbox %s: %w", id, err)
	}
	return nil
}

// checkOpen refuses new work while the service closes.
func (s *Service) checkOpen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed()
	}
	return nil
}
