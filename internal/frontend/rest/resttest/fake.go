// Package resttest holds a fake of the service below the REST front end, for the
// tests of the front end, the Go client and the command line.
//
// It keeps sandboxes, snapshots and images in memory, with ids and times that
// are the same in each run, and counts what changed its state.
package resttest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// Born is when everything in a fake was made.
func Born() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }

// Service is the fake. The exported fields may be set before it is used.
type Service struct {
	// OnExec and OnEval answer for the guest; nil gives fixed answers.
	OnExec func(ctx context.Context, ref string, r agentwire.ExecRequest) (agentwire.ExecResult, error)
	OnEval func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error)
	// OnLogs answers for logs; nil gives a fixed one.
	OnLogs func(ctx context.Context, req sandbox.LogRequest, write func([]byte) error) error
	// OnFork runs before any child of a fork is made; an error ends the call.
	OnFork func(ctx context.Context, f sandbox.Fork) error
	// FailChild gives the error of single children, by index.
	FailChild map[int]error
	// Err, if set, is the answer of every call.
	Err error

	mu sync.Mutex
	// +checklocks:mu
	next int
	// +checklocks:mu
	changes int
	// +checklocks:mu
	sandboxes []sandbox.Sandbox
	// +checklocks:mu
	snapshots []sandbox.Snapshot
	// +checklocks:mu
	checkpoints []checkpoint
	// +checklocks:mu
	images []sandbox.Image
	// +checklocks:mu
	pools []sandbox.WarmPool
}

// New returns a fake that holds the image python and the snapshot py-base.
func New() *Service {
	return &Service{
		images: []sandbox.Image{{
			ID: "im00000000000000000001", Name: "python", CreatedAt: Born(), Source: "debian:bookworm", Packages: []string{"python3", "python3-numpy"},
			DiskMiB: 4096, Bytes: 300 << 20, Digest: "sha256:00", Kernel: "6.1.0-forkd", Builtin: true, UsedBy: []string{"sn00000000000000000001"},
		}},
		snapshots: []sandbox.Snapshot{{
			ID: "sn00000000000000000001", Tags: []string{"py-base"}, Status: sandbox.SnapshotReady, ImageID: "im00000000000000000001", ImageName: "python",
			Engine: "fake", Isolation: engine.IsolationEmulated, Shape: shape(), CreatedAt: Born(), Recipe: sandbox.Recipe{Image: "python", Warm: "import numpy"},
			MemoryBytes: 60 << 20, DiskBytes: 1 << 20, DeviceBytes: 16 << 10, Dir: "/data/snapshots/sn1", Pause: 12 * time.Millisecond, AgentProtocol: 1, ForkMemory: sandbox.MemoryShared,
		}},
	}
}

func shape() engine.Shape { return engine.Shape{CPUs: 1, MemoryMiB: 512, DiskMiB: 4096} }

// Changes counts the calls that changed something.
func (s *Service) Changes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changes
}

// Living lists the ids of the sandboxes that are there.
func (s *Service) Living() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := []string{}
	for _, sb := range s.sandboxes {
		ids = append(ids, sb.ID)
	}
	return ids
}

// Fork implements rest.Sandboxes.
func (s *Service) Fork(ctx context.Context, f sandbox.Fork, each func(sandbox.ForkItem)) ([]sandbox.ForkItem, error) {
	sn, err := s.Snapshot(ctx, f.Snapshot)
	if source, sbErr := s.Sandbox(ctx, f.Snapshot); err != nil && sbErr == nil {
		sn, err = s.Snapshot(ctx, source.SnapshotID)
	}
	if err != nil {
		return nil, err
	}
	if f.Shape.MemoryMiB != 0 && f.Shape.MemoryMiB != sn.Shape.MemoryMiB {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "snapshot %s has %d MiB of memory, not %d", f.Snapshot, sn.Shape.MemoryMiB, f.Shape.MemoryMiB),
			"make a snapshot of that size")
	}
	if s.OnFork != nil {
		if err := s.OnFork(ctx, f); err != nil {
			return nil, err
		}
	}
	items := make([]sandbox.ForkItem, 0, f.N)
	for i := range f.N {
		it := sandbox.ForkItem{Index: i, Err: s.FailChild[i]}
		if it.Err == nil {
			it.Sandbox = s.add(f, i, sn)
		}
		items = append(items, it)
		if each != nil {
			each(it)
		}
	}
	for _, it := range items {
		if it.Err != nil && !f.Partial {
			s.drop(items)
			return nil, fmt.Errorf("fork child %d: %w", it.Index, it.Err)
		}
	}
	return items, nil
}

func (s *Service) add(f sandbox.Fork, index int, sn sandbox.Snapshot) sandbox.Sandbox {
	if index < len(f.Children) {
		labels := maps.Clone(f.Labels)
		if labels == nil {
			labels = map[string]string{}
		}
		maps.Copy(labels, f.Children[index].Labels)
		f.Labels = labels
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	s.changes++
	sb := sandbox.Sandbox{
		ID: fmt.Sprintf("sb%020d", s.next), Name: f.Name, State: sandbox.Running, SnapshotID: sn.ID, SnapshotTag: f.Snapshot,
		Engine: sn.Engine, Isolation: sn.Isolation, Shape: sn.Shape, Labels: f.Labels, CreatedAt: Born(), PID: 1000 + s.next,
		MemoryLimitMiB: f.MemoryLimitMiB, CPULimitPercent: f.CPULimitPercent, PIDsLimit: f.PIDsLimit,
		Receipt: &agentwire.Receipt{Steps: []agentwire.ReceiptStep{{Name: "kernel_csprng", Status: "done"}}, Generation: 1,
			ClockOffset: time.Millisecond, Duration: 3 * time.Millisecond},
		Timing: sandbox.Timing{Start: 50 * time.Millisecond, Hello: 70 * time.Millisecond, Identity: 90 * time.Millisecond, Total: 95 * time.Millisecond},
	}
	s.sandboxes = append(s.sandboxes, sb)
	return sb
}

func (s *Service) drop(items []sandbox.ForkItem) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range items {
		s.sandboxes = slices.DeleteFunc(s.sandboxes, func(sb sandbox.Sandbox) bool { return sb.ID == it.Sandbox.ID })
	}
}

// Sandboxes implements rest.Sandboxes.
func (s *Service) Sandboxes(context.Context) ([]sandbox.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.sandboxes), s.Err
}

// Sandbox implements rest.Sandboxes.
func (s *Service) Sandbox(_ context.Context, ref string) (sandbox.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Err != nil {
		return sandbox.Sandbox{}, s.Err
	}
	for _, sb := range s.sandboxes {
		if sb.ID == ref || (sb.Name != "" && sb.Name == ref) {
			return sb, nil
		}
	}
	return sandbox.Sandbox{}, errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "there is no sandbox %q", ref), "list them with: forkd ls")
}

// Usage implements rest.Sandboxes.
func (s *Service) Usage(ctx context.Context, ref string) (engine.Usage, error) {
	_, err := s.Sandbox(ctx, ref)
	return engine.Usage{PSSKiB: 24 << 10, PrivateKiB: 20 << 10, RSSKiB: 90 << 10, CPU: 50 * time.Millisecond, DiskBytes: 1 << 20,
		GuestPagesKiB: 9 << 10, LastActivity: Born().Add(time.Minute)}, err
}

// Kill implements rest.Sandboxes.
func (s *Service) Kill(ctx context.Context, ref string) error {
	sb, err := s.Sandbox(ctx, ref)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes++
	s.sandboxes = slices.DeleteFunc(s.sandboxes, func(other sandbox.Sandbox) bool { return other.ID == sb.ID })
	return nil
}
