package sandbox

import (
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// TestColdFork: a cold fork has the files of its snapshot and nothing of its memory, says
// so in its receipt, takes no prepared machine, works on a stale snapshot, and what is
// captured of it needs no other snapshot.
func TestColdFork(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PoolSize = 1 })
	w.base()
	source := w.fork("base", 1)[0]
	w.exec(source.ID, "write", "/file", "kept")
	must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "journal"}))
	must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "synced", Sync: true}))
	for _, tag := range []string{"journal", "synced"} {
		sb := must(w.svc.Fork(w.ctx(), Fork{Snapshot: tag, N: 1, Cold: true, Labels: map[string]string{"k": "v"}}, nil))[0].Sandbox
		if got := w.exec(sb.ID, "cat", "/file"); got != "kept" {
			t.Errorf("%s: the file holds %q", tag, got)
		}
		if res := must(w.svc.Eval(w.ctx(), sb.ID, agentwire.EvalRequest{Code: "value"})); res.Error == "" {
			t.Errorf("%s: it has the memory of the snapshot: %q", tag, res.Result)
		}
		if sb.Timing.Pool != PoolNone || sb.Labels["k"] != "v" || sb.SnapshotTag != tag {
			t.Errorf("%s: the sandbox is %+v", tag, sb)
		}
		warned := slices.ContainsFunc(sb.Receipt.NotCovered, func(n string) bool { return strings.Contains(n, "loss of power") })
		if warned != (tag == "journal") {
			t.Errorf("%s: the receipt says %q", tag, sb.Receipt.NotCovered)
		}
		w.eval(sb.ID, "value=own")
		point := must(w.svc.Checkpoint(w.ctx(), sb.ID, Checkpoint{Sync: true})).Snapshot
		if point.ParentID != "" {
			t.Errorf("%s: the checkpoint has parent %s", tag, point.ParentID)
		}
		w.eval(sb.ID, "value=dirty")
		must(w.svc.Rollback(w.ctx(), sb.ID, ""))
		if got := w.eval(sb.ID, "value"); got != "own" {
			t.Errorf("%s: after a rollback it has %q", tag, got)
		}
		for _, n := range must(w.svc.Tree(w.ctx(), "")) {
			if n.ID == point.ID && n.ParentID != sb.SnapshotID {
				t.Errorf("%s: in the tree the checkpoint comes from %q", tag, n.ParentID)
			}
		}
	}
	w.build = "2"
	w.restart()
	_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "synced", N: 1}, nil)
	w.wantClass(err, errdefs.ErrNotReady)
	if !strings.Contains(errdefs.Hint(err), "--cold") {
		t.Errorf("the hint is %q", errdefs.Hint(err))
	}
	sb := must(w.svc.Fork(w.ctx(), Fork{Snapshot: "synced", N: 1, Cold: true}, nil))[0].Sandbox
	if got := w.exec(sb.ID, "cat", "/file"); got != "kept" {
		t.Errorf("of a stale snapshot: the file holds %q", got)
	}
}
