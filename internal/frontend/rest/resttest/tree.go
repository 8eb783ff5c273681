package resttest

import (
	"context"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// Tree implements rest.Historian: snapshots, and below the first all sandboxes, each
// below its last checkpoint.
func (s *Service) Tree(ctx context.Context, ref string) ([]sandbox.Node, error) {
	if ref != "" {
		if _, err := s.Snapshot(ctx, ref); err != nil {
			if _, err := s.Sandbox(ctx, ref); err != nil {
				return nil, errdefs.New(errdefs.ErrNotFound, "there is no snapshot or sandbox %q", ref)
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	root := s.snapshots[0]
	out := []sandbox.Node{{ID: root.ID, Kind: sandbox.NodeSnapshot, Name: strings.Join(root.Tags, ", "), State: "ready", CreatedAt: Born()}}
	for _, sb := range s.sandboxes {
		parent, depth := root.ID, 1
		for _, c := range s.checkpoints {
			if c.of == sb.ID {
				out = append(out, sandbox.Node{
					ID: c.sn.ID, Kind: sandbox.NodeCheckpoint, ParentID: parent, Depth: depth, Name: c.sn.Labels["forkd.label"], State: "ready",
					Of: sb.ID, Auto: c.sn.Labels["forkd.auto"] != "", CreatedAt: Born(),
				})
				parent, depth = c.sn.ID, depth+1
			}
		}
		out = append(out, sandbox.Node{
			ID: sb.ID, Kind: sandbox.NodeSandbox, ParentID: parent, Depth: depth, Name: sb.Name, State: string(sb.State), Labels: sb.Labels, CreatedAt: Born(),
		})
	}
	return out, nil
}

// Diff implements rest.Historian: some of everything differs, with a name that is no
// text and one that would move a terminal's cursor.
func (s *Service) Diff(ctx context.Context, req sandbox.DiffRequest, progress sandbox.Progress) (sandbox.Diff, error) {
	if err := ctx.Err(); err != nil {
		return sandbox.Diff{}, err
	}
	for _, ref := range []string{req.A, req.B} {
		_, snErr := s.Snapshot(ctx, ref)
		if _, sbErr := s.Sandbox(ctx, ref); snErr != nil && sbErr != nil {
			return sandbox.Diff{}, errdefs.New(errdefs.ErrNotFound, "there is no snapshot or sandbox %q", ref)
		}
	}
	if progress != nil {
		progress("listing files", -1)
	}
	if req.A == req.B {
		return sandbox.Diff{}, nil
	}
	d := sandbox.Diff{
		A: sandbox.DiffSide{SnapshotID: "sn00000000000000000001", Files: 1000, Processes: 20, Memory: agentwire.MemoryTotals{TotalKiB: 512 << 10, AvailableKiB: 300 << 10}},
		B: sandbox.DiffSide{SnapshotID: "sn00000000000000000002", Files: 1001, Processes: 21, Memory: agentwire.MemoryTotals{TotalKiB: 512 << 10, AvailableKiB: 290 << 10}},
		Changes: []sandbox.Change{
			{Path: "/bad\x1b[2J\xff", Kind: sandbox.Added, Type: "file", SizeB: 5},
			{Path: "/etc/motd", Kind: sandbox.Changed, Type: "file", What: []string{"content", "mode"}, SizeA: 10, SizeB: 2048},
			{Path: "/old", Kind: sandbox.Removed, Type: "dir"},
		},
		ProcessesAdded:   []agentwire.ProcessEntry{{PID: 42, Name: "sleep", Command: "sleep 100", RSSKiB: 900}},
		ProcessesRemoved: []agentwire.ProcessEntry{},
		Duration:         2 * time.Second,
	}
	if req.Patch {
		d.Patch, d.PatchSkipped = "--- a/etc/motd\n+++ b/etc/motd\n@@ -1 +1 @@\n-old\n+new \x1b[31m\n", 1
	}
	return d, nil
}
