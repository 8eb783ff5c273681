package resttest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// checkpoint is one checkpoint of a sandbox.
type checkpoint struct {
	of string
	sn sandbox.Snapshot
}

// Checkpoint implements rest.Checkpointer: the capture takes 2 ms.
func (s *Service) Checkpoint(ctx context.Context, ref string, c sandbox.Checkpoint) (sandbox.Branched, error) {
	sb, err := s.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.Branched{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes++
	sn := s.snapshots[0]
	sn.ID, sn.Tags, sn.ParentID, sn.Depth = fmt.Sprintf("ck%020d", len(s.checkpoints)+1), nil, sb.SnapshotID, 1
	sn.Labels = map[string]string{"forkd.checkpoint-of": sb.ID}
	if c.Label != "" {
		sn.Labels["forkd.label"] = c.Label
	}
	s.checkpoints = append(s.checkpoints, checkpoint{sb.ID, sn})
	if !c.Sync {
		sn.Status = sandbox.SnapshotWriting
	}
	return sandbox.Branched{
		Snapshot: sn, SourceID: sb.ID, Pause: 2 * time.Millisecond, Stall: 15 * time.Millisecond, CopiedBytes: 1 << 20, LayerBytes: 300 << 10,
	}, nil
}

// Checkpoints implements rest.Checkpointer.
func (s *Service) Checkpoints(ctx context.Context, ref string) ([]sandbox.Snapshot, error) {
	sb, err := s.Sandbox(ctx, ref)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []sandbox.Snapshot
	for _, c := range s.checkpoints {
		if c.of == sb.ID {
			out = append(out, c.sn)
		}
	}
	return out, nil
}

// Rollback implements rest.Checkpointer: it takes 120 ms and revives what is lost.
func (s *Service) Rollback(ctx context.Context, ref, to string) (sandbox.RolledBack, error) {
	sb, err := s.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.RolledBack{}, err
	}
	all, err := s.Checkpoints(ctx, ref)
	if err != nil {
		return sandbox.RolledBack{}, err
	}
	slices.Reverse(all)
	i := slices.IndexFunc(all, func(sn sandbox.Snapshot) bool { return to == "" || sn.ID == to || sn.Labels["forkd.label"] == to })
	if i < 0 {
		return sandbox.RolledBack{}, errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "sandbox %s has no checkpoint %q", sb.ID, to), "list them with: forkd checkpoints %s", sb.ID)
	}
	return sandbox.RolledBack{Sandbox: s.change(sb.ID, func(sb *sandbox.Sandbox) { sb.State, sb.Reason = sandbox.Running, "" }),
		CheckpointID: all[i].ID, Duration: 120 * time.Millisecond}, nil
}

// ScheduleCheckpoints implements rest.Checkpointer.
func (s *Service) ScheduleCheckpoints(ctx context.Context, ref string, a sandbox.AutoCheckpoint) (sandbox.Sandbox, error) {
	sb, err := s.Sandbox(ctx, ref)
	if err != nil {
		return sb, err
	}
	if a.Every > 0 && a.Keep == 0 {
		a.Keep = sandbox.DefaultAutoKeep
	}
	return s.change(sb.ID, func(sb *sandbox.Sandbox) { sb.Auto = a }), nil
}

// Lose puts a sandbox into the state lost.
func (s *Service) Lose(id string) {
	s.change(id, func(sb *sandbox.Sandbox) { sb.State, sb.Reason, sb.PID = sandbox.Lost, "killed by a test", 0 })
}

func (s *Service) change(id string, fn func(*sandbox.Sandbox)) sandbox.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes++
	for i := range s.sandboxes {
		if s.sandboxes[i].ID == id {
			fn(&s.sandboxes[i])
			return s.sandboxes[i]
		}
	}
	return sandbox.Sandbox{}
}
