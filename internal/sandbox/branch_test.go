package sandbox

import (
	"context"
	"errors"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
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

// TestTagOfAFailedBranch: a branch that failed in the background keeps its tag, by which
// its reason is found, until somebody else wants it; after a day it is forgotten.
func TestTagOfAFailedBranch(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.fork("base", 1)[0]
	fail := func(tag string) string {
		w.script.onFault(func(op fake.Op, _ string) error {
			if op == fake.OpRestore {
				return errors.New("no")
			}
			return nil
		})
		b := must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: tag, NoWait: true}))
		w.eventually("it has failed", func() bool { return must(w.svc.Snapshot(w.ctx(), tag)).Status == SnapshotFailed })
		w.eventually("the source runs", func() bool { return must(w.svc.Sandbox(w.ctx(), source.ID)).State == Running })
		w.script.onFault(nil)
		return b.Snapshot.ID
	}
	first := fail("mine")
	if sn := must(w.svc.Snapshot(w.ctx(), "mine")); sn.ID != first || sn.Reason == "" {
		t.Errorf("by its tag it is %+v", sn)
	}
	second := must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "mine"}))
	if sn := must(w.svc.Snapshot(w.ctx(), "mine")); sn.ID != second.Snapshot.ID {
		t.Errorf("the tag is at %+v", sn)
	}
	if sn := must(w.svc.Snapshot(w.ctx(), first)); len(sn.Tags) != 0 || sn.Status != SnapshotFailed {
		t.Errorf("the failed one is %+v", sn)
	}
	_, err := w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "mine"})
	w.wantClass(err, errdefs.ErrConflict)
	fail("other")
	must(w.svc.Fork(w.ctx(), Fork{Snapshot: "mine", N: 1, Name: "other"}, nil))
	for _, late := range []time.Duration{time.Hour, keepEnded + time.Hour} {
		if err := w.svc.expire(w.ctx(), time.Now().Add(late)); err != nil {
			t.Fatal(err)
		}
		_, err := w.svc.Snapshot(w.ctx(), first)
		if gone := errors.Is(err, errdefs.ErrNotFound); gone != (late > keepEnded) {
			t.Errorf("after %v: %v", late, err)
		}
	}
	w.consistent()
}

// TestCaptureOwesTheSource: a guest that a capture could not thaw is thawed later, and
// what would capture it waits for that.
func TestCaptureOwesTheSource(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.fork("base", 1)[0]
	full := errdefs.New(errdefs.ErrResourceExhausted, "the disk is full")
	for at := 1; at < 6; at++ { // a journal that cannot be written is no reason, either
		n := 0
		w.script.onWrite(func(step metadata.Step) error {
			if step == metadata.StepWrite {
				if n++; n == at {
					return full
				}
			}
			return nil
		})
		_, err := w.svc.Branch(w.ctx(), source.ID, Branch{})
		w.script.onWrite(nil)
		if at != 4 { // that only counts the branch
			w.wantClass(err, errdefs.ErrResourceExhausted)
		}
		w.exec(source.ID, "hostname")
		must(w.svc.Branch(w.ctx(), source.ID, Branch{}))
	}
	e := must(w.svc.resolve(source.ID))
	e.update(func(sb *Sandbox) { sb.owed = verdictSource })
	w.svc.group.Go(func() { w.svc.goOn(e) })
	must(w.svc.Checkpoint(w.ctx(), source.ID, Checkpoint{Sync: true}))
	if row := must(w.journal.GetSandbox(w.ctx(), source.ID)); row.VerdictOwed != "" {
		t.Errorf("it is owed %q", row.VerdictOwed)
	}
	w.consistent()
}

// TestParentGoesWhileABranchIsWritten: what a capture lies on cannot be deleted before
// it is stored.
func TestParentGoesWhileABranchIsWritten(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.fork("base", 1)[0]
	must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "parent"}))
	at, goOn := make(chan struct{}), make(chan struct{})
	w.script.onStep(func(step snapshot.Step, _ string) error {
		if step == snapshot.StepSealArtifact {
			w.script.onStep(nil)
			close(at)
			<-goOn
		}
		return nil
	})
	b := must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "child", NoWait: true}))
	<-at
	w.wantClass(w.svc.DeleteSnapshot(w.ctx(), "parent", Delete{}), errdefs.ErrConflict)
	close(goOn)
	w.eventually("it is ready", func() bool { return must(w.svc.Snapshot(w.ctx(), b.Snapshot.ID)).Status == SnapshotReady })
	w.fork("child", 1)
	w.consistent()
}

// TestMachineEndsWhileACheckpointIsWritten: the sandbox is lost, not gone, since it has
// something to come back from.
func TestMachineEndsWhileACheckpointIsWritten(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	items := must(w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1, Name: "worker"}, nil))
	id := items[0].Sandbox.ID
	w.eval(id, "v=kept")
	at, goOn := make(chan struct{}), make(chan struct{})
	w.script.onStep(func(step snapshot.Step, _ string) error {
		if step == snapshot.StepSealArtifact {
			w.script.onStep(nil)
			close(at)
			<-goOn
		}
		return nil
	})
	must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{}))
	<-at
	w.host.Crash(id, "killed by a test")
	w.eventually("it has ended", func() bool { return must(w.svc.Sandbox(w.ctx(), id)).State == Failed })
	close(goOn)
	w.eventually("it can come back", func() bool { return must(w.svc.Sandbox(w.ctx(), id)).State == Lost })
	w.restart()
	must(w.svc.Rollback(w.ctx(), "worker", ""))
	if got := w.eval("worker", "v"); got != "kept" {
		t.Errorf("it came back with %q", got)
	}
	w.consistent()
}
