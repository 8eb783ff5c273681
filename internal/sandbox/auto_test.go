package sandbox

import (
	"context"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// pass lets the schedules see that d is over, and waits for what they do.
func (w *world) pass(now *time.Time, d time.Duration) {
	w.t.Helper()
	*now = now.Add(d)
	for _, e := range w.svc.dueAt(*now) {
		w.svc.autoCheckpoint(context.Background(), e, *now)
	}
}

// TestAutoCheckpoint: a sandbox that does something gets a checkpoint each interval,
// one that rests gets none, the newest stay, and so do those made by hand.
func TestAutoCheckpoint(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	_, err := w.svc.ScheduleCheckpoints(w.ctx(), id, AutoCheckpoint{Every: time.Millisecond})
	w.wantClass(err, errdefs.ErrInvalid)
	_, err = w.svc.ScheduleCheckpoints(w.ctx(), id, AutoCheckpoint{Every: time.Hour, Keep: maxAutoKeep + 1})
	w.wantClass(err, errdefs.ErrInvalid)
	if sb := must(w.svc.ScheduleCheckpoints(w.ctx(), id, AutoCheckpoint{Every: time.Hour})); sb.Auto.Keep != DefaultAutoKeep {
		t.Errorf("schedule is %+v", sb.Auto)
	}
	must(w.svc.ScheduleCheckpoints(w.ctx(), id, AutoCheckpoint{Every: time.Hour, Keep: 2}))
	hand := must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Label: "hand", Sync: true})).Snapshot.ID
	now := time.Now()
	count := func(want int) {
		t.Helper()
		if got := len(must(w.svc.Checkpoints(w.ctx(), id))); got != want {
			t.Errorf("%d checkpoints, want %d", got, want)
		}
	}
	w.pass(&now, 0) // the first interval begins
	count(1)
	for i, v := range []string{"one", "two", "three", "four"} {
		// Calls stand at the real time, which the schedule is far ahead of.
		w.eval(id, "v="+v)
		e := must(w.svc.resolve(id))
		e.mu.Lock()
		e.used = now.Add(time.Minute)
		e.mu.Unlock()
		w.pass(&now, time.Hour)
		count(1 + min(i+1, 2))
		w.pass(&now, time.Hour) // it rested
		count(1 + min(i+1, 2))
		w.pass(&now, time.Minute)
	}
	must(w.svc.Rollback(w.ctx(), id, ""))
	if got := w.eval(id, "v"); got != "four" {
		t.Errorf("it went back to %q", got)
	}
	w.restart()
	if sb := must(w.svc.Sandbox(w.ctx(), id)); sb.Auto != (AutoCheckpoint{Every: time.Hour, Keep: 2}) {
		t.Errorf("after a rollback and a restart the schedule is %+v", sb.Auto)
	}
	must(w.svc.Rollback(w.ctx(), id, hand))
	must(w.svc.ScheduleCheckpoints(w.ctx(), id, AutoCheckpoint{}))
	w.pass(&now, 0)
	w.pass(&now, 2*time.Hour)
	count(3)
	w.consistent()
}

// TestCheckpointsFollowClosely: one does not fail because the one before is still
// being written, and neither does a rollback.
func TestCheckpointsFollowClosely(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	id := w.fork("base", 1)[0].ID
	for _, v := range []string{"one", "two", "three"} {
		w.eval(id, "v="+v)
		must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Label: v}))
		w.eval(id, "v=dirty")
	}
	for _, v := range []string{"three", "one", "two"} {
		must(w.svc.Rollback(w.ctx(), id, v))
		if got := w.eval(id, "v"); got != v {
			t.Errorf("back at %s it has %q", v, got)
		}
		must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{}))
	}
	w.eventually("it runs", func() bool { return must(w.svc.Sandbox(w.ctx(), id)).State == Running })
	w.consistent()
}
