package sandbox

import (
	"errors"
	"testing"

	"forkd.dev/forkd/internal/engine/fake"
)

// spareOf waits for the spare of a sandbox and returns its machine's id.
func (w *world) spareOf(sandboxID, checkpoint string) string {
	w.t.Helper()
	machine := ""
	w.eventually("there is a spare of "+sandboxID, func() bool {
		w.svc.spares.mu.Lock()
		defer w.svc.spares.mu.Unlock()
		for _, sp := range w.svc.spares.all {
			if sp.sandboxID != sandboxID || sp.checkpoint != checkpoint {
				continue
			}
			select {
			case <-sp.made:
				machine = sp.machine.ID()
			default:
			}
		}
		return machine != ""
	})
	return machine
}

func (w *world) machineOf(sandboxID string) string {
	return must(w.svc.resolve(sandboxID)).snapshot().machine()
}

// withSpares is a world that prepares machines, with a sandbox that has a checkpoint.
func withSpares(t *testing.T) (w *world, id, checkpoint string) {
	w = newWorld(t, func(c *Config) { c.PoolSize = 1 })
	w.base()
	id = w.fork("base", 1)[0].ID
	w.eval(id, "v=kept")
	return w, id, must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true})).Snapshot.ID
}

// TestRollbackClaimsASpare: the machine that proved a checkpoint is the one a rollback
// swaps in, and another takes its place, as often as one likes.
func TestRollbackClaimsASpare(t *testing.T) {
	w, id, checkpoint := withSpares(t)
	for range 3 {
		spare := w.spareOf(id, checkpoint)
		w.eval(id, "v=dirty")
		must(w.svc.Rollback(w.ctx(), id, ""))
		if got := w.machineOf(id); got != spare {
			t.Errorf("the sandbox has machine %s, its spare was %s", got, spare)
		}
		if got := w.eval(id, "v"); got != "kept" {
			t.Errorf("after the rollback v is %q", got)
		}
	}
	for range 20 { // whether the next one is there yet or not
		w.eval(id, "v=dirty")
		must(w.svc.Rollback(w.ctx(), id, checkpoint))
		if got := w.eval(id, "v"); got != "kept" {
			t.Errorf("after the rollback v is %q", got)
		}
	}
	w.spareOf(id, checkpoint)
}

// TestSpareFails: a rollback whose spare died, or could not be made, starts a machine.
func TestSpareFails(t *testing.T) {
	w, id, checkpoint := withSpares(t)
	if !w.host.Crash(w.spareOf(id, checkpoint), "killed by a test") {
		t.Fatal("no spare to crash")
	}
	must(w.svc.Rollback(w.ctx(), id, ""))
	boom := make(chan struct{}, 1)
	w.spareOf(id, checkpoint)
	w.script.onFault(func(op fake.Op, _ string) error {
		if op == fake.OpRestore {
			select {
			case boom <- struct{}{}:
				return errors.New("scripted")
			default:
			}
		}
		return nil
	})
	must(w.svc.Rollback(w.ctx(), id, ""))
	w.eventually("the next spare failed", func() bool { return len(boom) == 1 })
	must(w.svc.Rollback(w.ctx(), id, ""))
	if got := w.eval(id, "v"); got != "kept" {
		t.Errorf("v is %q", got)
	}
}

// TestSparesGo: a spare goes with its sandbox, with its checkpoint, when the sandbox
// makes another checkpoint, and when somebody needs its room.
func TestSparesGo(t *testing.T) {
	w, id, first := withSpares(t)
	w.spareOf(id, first)
	gone := func(what, machine string) {
		t.Helper()
		for _, m := range w.host.Running() {
			if m == machine {
				t.Errorf("%s: machine %s is still there", what, machine)
			}
		}
	}
	old := w.spareOf(id, first)
	second := must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true})).Snapshot.ID
	gone("after another checkpoint", old)
	old = w.spareOf(id, second)
	if err := w.svc.DeleteSnapshot(w.ctx(), second, Delete{}); err != nil {
		t.Fatal(err)
	}
	gone("after its checkpoint was deleted", old)
	must(w.svc.Rollback(w.ctx(), id, first))
	old = w.spareOf(id, first)
	if !w.svc.yieldSpares() || w.svc.yieldSpares() {
		t.Error("not exactly one spare gave way")
	}
	gone("after it gave way", old)
	must(w.svc.Rollback(w.ctx(), id, first))
	old = w.spareOf(id, first)
	if err := w.svc.Kill(w.ctx(), id); err != nil {
		t.Fatal(err)
	}
	gone("after its sandbox ended", old)
}

// TestSparesAreBounded: all sandboxes together have no more than maxSpares.
func TestSparesAreBounded(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PoolSize = 1 })
	w.base()
	for _, sb := range w.fork("base", maxSpares+3) {
		must(w.svc.Checkpoint(w.ctx(), sb.ID, Checkpoint{Sync: true}))
	}
	w.svc.spares.mu.Lock()
	defer w.svc.spares.mu.Unlock()
	if n := len(w.svc.spares.all); n != maxSpares {
		t.Errorf("there are %d spares", n)
	}
}
