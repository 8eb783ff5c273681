package resttest

import (
	"context"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// Branch implements rest.Brancher: a capture takes 3 ms, and one that nobody waits
// for is ready at the next look.
func (s *Service) Branch(ctx context.Context, ref string, b sandbox.Branch) (sandbox.Branched, error) {
	sb, err := s.Sandbox(ctx, ref)
	if err != nil {
		return sandbox.Branched{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.Tag == "" {
		b.Tag = fmt.Sprintf("branch-%d", len(s.snapshots)+1)
	}
	switch {
	case b.Mode != "" && b.Mode != sandbox.ModeLive && b.Mode != sandbox.ModeDiff && b.Mode != sandbox.ModeFull:
		return sandbox.Branched{}, errdefs.New(errdefs.ErrInvalid, "mode %q is not full, diff or live", b.Mode)
	case s.taggedLocked(b.Tag) >= 0 && !b.Replace:
		return sandbox.Branched{}, errdefs.New(errdefs.ErrConflict, "tag %q is taken", b.Tag)
	case b.From != "" && b.From != sb.SnapshotTag && b.From != sb.SnapshotID:
		return sandbox.Branched{}, errdefs.New(errdefs.ErrInvalid, "sandbox %s was not forked from %s", sb.ID, b.From)
	}
	s.changes++
	sn := s.snapshots[0]
	sn.ID, sn.Tags, sn.ParentID, sn.Depth = fmt.Sprintf("sn%020d", len(s.snapshots)+1), []string{b.Tag}, sb.SnapshotID, 1
	sn.BranchedFrom, sn.Labels, sn.Recipe = sb.ID, b.Labels, sandbox.Recipe{From: sb.ID}
	if b.Mode == sandbox.ModeFull {
		sn.ParentID, sn.Depth = "", 0
	}
	s.snapshots = append(s.snapshots, sn)
	if b.NoWait {
		sn.Status = sandbox.SnapshotWriting
	}
	return sandbox.Branched{
		Snapshot: sn, SourceID: sb.ID, Pause: 3 * time.Millisecond, Stall: 20 * time.Millisecond, CopiedBytes: 1 << 20, LayerBytes: 300 << 10,
	}, nil
}
