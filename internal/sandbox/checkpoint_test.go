package sandbox

import (
	"errors"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/snapshot"
)

// TestRollback: a sandbox returns to any of its checkpoints under the same id,
// forwards too, with memory and disk as they were.
func TestRollback(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	var points []string
	for _, v := range []string{"one", "two"} {
		w.eval(id, "v="+v)
		w.exec(id, "write", "/file", v)
		points = append(points, must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Label: "at-" + v, Sync: true})).Snapshot.ID)
	}
	w.eval(id, "v=three")
	host := w.exec(id, "hostname")
	for _, to := range []string{"", points[0], "at-two", points[0][:8]} {
		want := "two"
		if to == points[0] || to == points[0][:8] {
			want = "one"
		}
		r := must(w.svc.Rollback(w.ctx(), id, to))
		if r.Sandbox.ID != id || r.Sandbox.State != Running {
			t.Fatalf("rolled back to %+v", r.Sandbox)
		}
		if got := w.eval(id, "v"); got != want {
			t.Errorf("after a rollback to %q v is %q", to, got)
		}
		if got := w.exec(id, "cat", "/file"); got != want {
			t.Errorf("after a rollback to %q the file holds %q", to, got)
		}
		w.eval(id, "v=dirty")
		if got := w.exec(id, "hostname"); got != host {
			t.Errorf("the host name became %q", got)
		}
		w.consistent()
	}
	if n := len(must(w.svc.Checkpoints(w.ctx(), id))); n != 2 {
		t.Errorf("%d checkpoints", n)
	}
	child := w.fork(points[0], 1)[0]
	if got := w.eval(child.ID, "v"); got != "one" {
		t.Errorf("a fork of a checkpoint has %q", got)
	}
	w.restart()
	if got := w.eval(id, "v"); got != "dirty" {
		t.Errorf("after a restart v is %q", got)
	}
	if err := w.svc.Kill(w.ctx(), id); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.Kill(w.ctx(), child.ID); err != nil {
		t.Fatal(err)
	}
	if all := must(w.svc.Snapshots(w.ctx())); len(all) != 1 {
		t.Errorf("left are %+v", all)
	}
	w.consistent()
}

// TestRollbackOfLost: a sandbox whose machine died is lost, not gone, and comes back.
func TestRollbackOfLost(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	_, err := w.svc.Rollback(w.ctx(), id, "")
	w.wantClass(err, errdefs.ErrNotFound)
	w.eval(id, "v=kept")
	must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
	if !w.host.Crash(id, "killed by a test") {
		t.Fatal("no machine to crash")
	}
	w.eventually("it is lost", func() bool { return must(w.svc.Sandbox(w.ctx(), id)).State == Lost })
	w.restart()
	if sb := must(w.svc.Sandbox(w.ctx(), id)); sb.State != Lost {
		t.Fatalf("after a restart it is %s", sb.State)
	}
	must(w.svc.Rollback(w.ctx(), id, ""))
	if got := w.eval(id, "v"); got != "kept" {
		t.Errorf("it came back with %q", got)
	}
	w.consistent()
}

// TestRollbackFails: if the new machine does not come up, the sandbox goes on as it is.
func TestRollbackFails(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
	w.eval(id, "v=now")
	boom := errors.New("boom")
	for _, op := range []fake.Op{fake.OpRestore, fake.OpResume, fake.OpDial} {
		w.script.onFault(func(at fake.Op, machine string) error {
			if at == op && machine != id {
				return boom
			}
			return nil
		})
		if _, err := w.svc.Rollback(w.ctx(), id, ""); !errors.Is(err, boom) {
			t.Errorf("%s: error is %v", op, err)
		}
		w.script.onFault(nil)
		if got := w.eval(id, "v"); got != "now" {
			t.Errorf("%s: it has %q", op, got)
		}
		w.consistent()
	}
}

// TestRollbackEndsCalls: what was under way in the machine before ends with the
// reason, at once.
func TestRollbackEndsCalls(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	held, reached := make(chan struct{}), make(chan struct{})
	w.script.onGuest(func(string) fake.GuestFaults {
		return fake.GuestFaults{Hold: func(call string) <-chan struct{} {
			if call != "exec" {
				return nil
			}
			close(reached)
			return held
		}}
	})
	id := w.fork("base", 1)[0].ID
	w.script.onGuest(nil)
	must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
	ended := make(chan error, 1)
	go func() {
		_, err := w.svc.Exec(w.ctx(), id, agentwire.ExecRequest{Argv: []string{"hostname"}})
		ended <- err
	}()
	<-reached
	must(w.svc.Rollback(w.ctx(), id, ""))
	err := <-ended
	w.wantClass(err, errdefs.ErrConflict)
	if err == nil || !strings.Contains(err.Error(), "was rolled back meanwhile") {
		t.Errorf("the call ended with %v", err)
	}
	w.exec(id, "hostname")
}

// TestRollbackToBranch: a branch of the sandbox is a place to return to, a branch of
// another is not.
func TestRollbackToBranch(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	pair := w.fork("base", 2)
	w.eval(pair[0].ID, "v=then")
	must(w.svc.Branch(w.ctx(), pair[0].ID, Branch{Tag: "mine"}))
	w.eval(pair[0].ID, "v=now")
	must(w.svc.Rollback(w.ctx(), pair[0].ID, "mine"))
	if got := w.eval(pair[0].ID, "v"); got != "then" {
		t.Errorf("it has %q", got)
	}
	for _, to := range []string{"mine", "base"} {
		_, err := w.svc.Rollback(w.ctx(), pair[1].ID, to)
		w.wantClass(err, errdefs.ErrNotFound)
	}
}

// TestCheckpointsAreSynced: the disk of a checkpoint is whole, unless user processes
// were not to be frozen for it.
func TestCheckpointsAreSynced(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	for c, want := range map[Checkpoint]snapshot.DiskState{
		{Sync: true}:                 snapshot.DiskSynced,
		{Sync: true, NoFreeze: true}: snapshot.DiskJournal,
	} {
		point := must(w.svc.Checkpoint(w.ctx(), id, c)).Snapshot.ID
		if m := must(w.store.Get(point)); m.Disk != want {
			t.Errorf("%+v: the disk is %q, want %q", c, m.Disk, want)
		}
	}
}
