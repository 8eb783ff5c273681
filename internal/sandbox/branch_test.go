package sandbox

import (
	"context"
	"errors"
	"testing"

	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
)

// TestBranch: children have the state of the instant, the source goes on, branches
// of one sandbox follow one another, and a branch can be deleted while its source lives.
func TestBranch(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.fork("base", 1)[0]
	var tags []string
	for _, v := range []string{"one", "two"} {
		w.eval(source.ID, "v="+v)
		b := must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "at-" + v}))
		if b.Snapshot.Status != SnapshotReady || b.SourceID != source.ID {
			t.Errorf("branch is %+v", b)
		}
		tags = append(tags, "at-"+v)
	}
	w.eval(source.ID, "v=later")
	for i, v := range []string{"one", "two"} {
		child := w.fork(tags[i], 1)[0]
		if got := w.eval(child.ID, "v"); got != v {
			t.Errorf("child of %s has %q", tags[i], got)
		}
		if err := w.svc.Kill(w.ctx(), child.ID); err != nil {
			t.Error(err)
		}
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "at-one", Delete{}); !errors.Is(err, errdefs.ErrConflict) {
		t.Errorf("deleting a parent: %v", err)
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "at-one", Delete{Cascade: true}); err != nil {
		t.Fatal(err)
	}
	full := must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "again"}))
	if got := w.eval(w.fork("again", 1)[0].ID, "v"); got != "later" || full.Snapshot.ParentID == "" {
		t.Errorf("child after the deletion has %q, its parent is %q", got, full.Snapshot.ParentID)
	}
	if sb := must(w.svc.Sandbox(w.ctx(), source.ID)); sb.BranchCount != 3 || sb.State != Running {
		t.Errorf("the source is %+v", sb)
	}
	w.consistent()
}

// TestForkOfSandbox: forking a sandbox branches it; the snapshot behind goes with
// its last child.
func TestForkOfSandbox(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.fork("base", 1)[0]
	w.eval(source.ID, "v=mine")
	children := w.fork(source.ID, 3)
	if all := must(w.svc.Snapshots(w.ctx())); len(all) != 2 {
		t.Fatalf("%d snapshots", len(all))
	}
	for _, c := range children {
		if got := w.eval(c.ID, "v"); got != "mine" {
			t.Errorf("child has %q", got)
		}
		if err := w.svc.Kill(w.ctx(), c.ID); err != nil {
			t.Error(err)
		}
	}
	if all := must(w.svc.Snapshots(w.ctx())); len(all) != 1 {
		t.Errorf("%d snapshots are left", len(all))
	}
	if got := w.eval(source.ID, "v"); got != "mine" {
		t.Errorf("the source has %q", got)
	}
	w.consistent()
}

// TestBranchNoWait: the call returns while the snapshot is written, a second capture
// meanwhile is a conflict, and a daemon that ends leaves it failed, not lost.
func TestBranchNoWait(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.fork("base", 1)[0]
	b := must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "later", NoWait: true}))
	w.eventually("it is ready", func() bool { return must(w.svc.Snapshot(w.ctx(), b.Snapshot.ID)).Status == SnapshotReady })
	w.eventually("the source runs", func() bool { return must(w.svc.Sandbox(w.ctx(), source.ID)).State == Running })
	w.fork("later", 1)
	_, err := w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "later"})
	w.wantClass(err, errdefs.ErrConflict)
	_, err = w.svc.Branch(w.ctx(), source.ID, Branch{Mode: "torn"})
	w.wantClass(err, errdefs.ErrInvalid)
	w.consistent()
}

// TestCaptureReturnsBeforeWriting: what does not wait for the snapshot returns when the
// source runs again, user processes thawed; what is taken is written although the
// caller is gone, and if that fails the snapshot stays listed as failed.
func TestCaptureReturnsBeforeWriting(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.fork("base", 1)[0]
	w.eval(source.ID, "v=at")
	for _, fail := range []error{nil, errors.New("scripted: no space")} {
		write := make(chan struct{})
		w.script.onFault(func(op fake.Op, _ string) error {
			if op != fake.OpWrite {
				return nil
			}
			<-write
			return fail
		})
		ctx, cancel := context.WithCancel(w.ctx())
		b, err := w.svc.Branch(ctx, source.ID, Branch{Mode: ModeLive, NoWait: true})
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if b.Snapshot.Status != SnapshotWriting || b.Pause <= 0 || b.Stall < b.Pause || b.LayerBytes != 0 {
			t.Errorf("before it is written the branch is %+v", b)
		}
		if got := w.eval(source.ID, "v"); got != "at" {
			t.Errorf("while the branch is written the source has %q", got)
		}
		close(write)
		want := SnapshotReady
		if fail != nil {
			want = SnapshotFailed
			defer func() {
				if err := w.svc.DeleteSnapshot(w.ctx(), b.Snapshot.ID, Delete{}); err != nil {
					t.Errorf("delete what failed: %v", err)
				}
				w.consistent()
			}()
		}
		w.eventually("it is "+string(want), func() bool { return must(w.svc.Snapshot(w.ctx(), b.Snapshot.ID)).Status == want })
		w.eventually("the source runs", func() bool { return must(w.svc.Sandbox(w.ctx(), source.ID)).State == Running })
	}
	w.script.onFault(nil)
	// What was not stored is in the next one.
	must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "next"}))
	if got := w.eval(w.fork("next", 1)[0].ID, "v"); got != "at" {
		t.Errorf("the child has %q", got)
	}
}
