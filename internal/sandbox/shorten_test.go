package sandbox

import (
	"errors"
	"fmt"
	"testing"

	"forkd.dev/forkd/internal/engine/fake"
)

// TestChainsStayShort: however often one sandbox is captured, or forks are captured and
// forked again, no chain gets longer than maxDepth; what is merged holds what it held,
// nothing that was published changes, and the tree shows where each came from.
func TestChainsStayShort(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	const captures = 2*maxDepth + 3
	id := w.fork("base", 1)[0].ID
	var points []string
	for i := range captures {
		w.eval(id, fmt.Sprintf("v=%d", i))
		w.exec(id, "write", fmt.Sprintf("/file%d", i), fmt.Sprint(i))
		points = append(points, must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true})).Snapshot.ID)
	}
	parents := map[string]string{}
	for _, n := range must(w.svc.Tree(w.ctx(), "")) {
		parents[n.ID] = n.ParentID
	}
	merged := 0
	for i, p := range points {
		sn := must(w.svc.Snapshot(w.ctx(), p))
		if sn.Depth > maxDepth {
			t.Errorf("checkpoint %d has %d ancestors", i, sn.Depth)
		}
		if sn.Labels[labelMadeFrom] != "" {
			merged++
		}
		if i > 0 && parents[p] != points[i-1] {
			t.Errorf("in the tree checkpoint %d comes from %s, not from the one before", i, parents[p])
		}
	}
	if merged == 0 {
		t.Error("nothing was merged")
	}
	for _, i := range []int{0, maxDepth - 1, maxDepth, captures - 1, 5} {
		must(w.svc.Rollback(w.ctx(), id, points[i]))
		if got := w.eval(id, "v"); got != fmt.Sprint(i) {
			t.Errorf("after a rollback to checkpoint %d v is %q", i, got)
		}
		for _, j := range []int{0, i} {
			if got := w.exec(id, "cat", fmt.Sprintf("/file%d", j)); got != fmt.Sprint(j) {
				t.Errorf("after a rollback to checkpoint %d file %d holds %q", i, j, got)
			}
		}
	}
	if rep, err := w.svc.Verify(w.ctx(), Verify{}, nil); err != nil {
		t.Errorf("verify: %+v, %v", rep, err)
	}
	w.consistent()
}

// TestGenerationsStayShort is the same for forks of captures of forks.
func TestGenerationsStayShort(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	from := "base"
	for i := range maxDepth + 5 {
		sb := w.fork(from, 1)[0]
		if i > 0 {
			if got := w.eval(sb.ID, "v"); got != fmt.Sprint(i-1) {
				t.Errorf("generation %d has %q", i, got)
			}
		}
		w.eval(sb.ID, fmt.Sprintf("v=%d", i))
		from = fmt.Sprintf("generation-%d", i)
		b := must(w.svc.Branch(w.ctx(), sb.ID, Branch{Tag: from}))
		if b.Snapshot.Depth > maxDepth {
			t.Errorf("generation %d has %d ancestors", i, b.Snapshot.Depth)
		}
		if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMergeFails: a capture whose layers cannot be merged is published as it is.
func TestMergeFails(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	capturing := ""
	for i := range maxDepth + 2 {
		writes := 0
		w.script.onFault(func(op fake.Op, machine string) error {
			if op == fake.OpWrite && machine != id {
				writes++
				return errors.New("scripted")
			}
			return nil
		})
		capturing = fmt.Sprint(i)
		w.eval(id, "v="+capturing)
		must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
		if deep := i >= maxDepth; deep != (writes > 0) {
			t.Errorf("capture %d tried to merge %d times", i, writes)
		}
	}
	w.script.onFault(nil)
	must(w.svc.Rollback(w.ctx(), id, ""))
	if got := w.eval(id, "v"); got != capturing {
		t.Errorf("v is %q, want %q", got, capturing)
	}
	w.consistent()
}

// TestMergeEndsWithTheDaemon: a daemon that ends does not wait for a merge; what was
// captured is published as it is.
func TestMergeEndsWithTheDaemon(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	for range maxDepth {
		must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
	}
	w.eval(id, "v=last")
	merging, closing := make(chan struct{}), w.svc.closing
	w.script.onFault(func(op fake.Op, machine string) error {
		if op != fake.OpWrite || machine == id {
			return nil
		}
		close(merging)
		<-closing.Done()
		return closing.Err()
	})
	last := must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{})).Snapshot.ID
	<-merging
	w.restart()
	w.script.onFault(nil)
	if sn := must(w.svc.Snapshot(w.ctx(), last)); sn.Status != SnapshotReady || sn.Labels[labelMadeFrom] != "" || sn.Depth != maxDepth+1 {
		t.Errorf("the checkpoint is %+v", sn)
	}
	w.eval(id, "v=dirty")
	must(w.svc.Rollback(w.ctx(), id, last))
	if got := w.eval(id, "v"); got != "last" {
		t.Errorf("v is %q", got)
	}
	w.consistent()
}

// TestMergeCrashes: after the daemon died in the middle of a merge the capture is failed,
// nothing half-made is left, and the sandbox can be captured again.
func TestMergeCrashes(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	for range maxDepth {
		must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
	}
	w.eval(id, "v=last")
	w.script.onFault(func(op fake.Op, machine string) error {
		if op == fake.OpWrite && machine != id {
			w.dead()
			return errCrashed
		}
		return nil
	})
	last, err := w.svc.Checkpoint(w.ctx(), id, Checkpoint{})
	w.buried()
	if err == nil {
		if sn := must(w.svc.Snapshot(w.ctx(), last.Snapshot.ID)); sn.Status != SnapshotFailed {
			t.Errorf("the checkpoint is %+v", sn)
		}
		if err := w.svc.DeleteSnapshot(w.ctx(), last.Snapshot.ID, Delete{}); err != nil {
			t.Error(err)
		}
	}
	w.consistent()
	must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
	w.eval(id, "v=dirty")
	must(w.svc.Rollback(w.ctx(), id, ""))
	if got := w.eval(id, "v"); got != "last" {
		t.Errorf("v is %q", got)
	}
	w.consistent()
}
