package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// victim is a daemon that dies at one point of what it does: a step of the engine, a
// durable step of the snapshot store, or before or after a write of the journal.
type victim struct {
	*world
	at    int // the point, counted from 0
	clone string

	mu     sync.Mutex
	points []string
	killed bool
}

// arm makes the daemon die at point v.at from now on.
func (v *victim) arm() {
	v.script.onFault(func(op fake.Op, _ string) error { return v.point("engine " + string(op)) })
	v.script.onStep(func(step snapshot.Step, _ string) error { return v.point("store " + string(step)) })
	v.script.onWrite(func(step metadata.Step) error { return v.point(string(step)) })
}

func (v *victim) disarm() {
	v.script.onFault(nil)
	v.script.onStep(nil)
	v.script.onWrite(nil)
}

func (v *victim) point(name string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.points = append(v.points, name)
	if !v.killed && len(v.points)-1 == v.at {
		v.killed = true
		// What a process that is still here cleans up must not count.
		if err := os.CopyFS(v.clone, os.DirFS(v.data)); err != nil {
			v.t.Error(err)
		}
		v.host.Disconnect()
	}
	if v.killed {
		return fake.ErrKilled
	}
	return nil
}

// next starts a daemon on what was on disk when the one before died.
func (v *victim) next() {
	v.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_ = v.svc.Close(ctx)
	_ = v.driver.Close()
	_ = v.journal.Close()
	v.disarm()
	for _, dir := range []string{"snapshots", "sandboxes"} {
		if err := os.RemoveAll(filepath.Join(v.data, dir)); err != nil {
			v.t.Fatal(err)
		}
	}
	entries, err := os.ReadDir(v.clone)
	if err != nil {
		v.t.Fatal(err)
	}
	for _, name := range []string{"forkd.db", "forkd.db-wal", "forkd.db-shm"} {
		if err := os.RemoveAll(filepath.Join(v.data, name)); err != nil {
			v.t.Fatal(err)
		}
	}
	for _, e := range entries {
		if e.Name() != "snapshots" && e.Name() != "sandboxes" && !strings.HasPrefix(e.Name(), "forkd.db") {
			continue
		}
		if err := os.Rename(filepath.Join(v.clone, e.Name()), filepath.Join(v.data, e.Name())); err != nil {
			v.t.Fatal(err)
		}
	}
	v.open()
}

// operation is one that the daemon is killed in.
type operation struct {
	name string
	// prepare returns what the operation is about: a sandbox or a snapshot.
	prepare func(w *world) string
	run     func(ctx context.Context, w *world, ref string) error
	// source tells that ref is a sandbox that holds v=now and goes on.
	source bool
	least  int // points that must be met at least
}

func newSource(w *world) string {
	w.base()
	id := w.fork("base", 1)[0].ID
	w.eval(id, "v=then")
	must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
	w.eval(id, "v=now")
	return id
}

// branched waits for the end of a capture.
func branched(ctx context.Context, w *world, b Branched, err error) error {
	if err != nil {
		return err
	}
	e, err := w.svc.resolve(b.SourceID)
	if err != nil {
		return err
	}
	return e.left(ctx, Capturing)
}

func operations(pack []byte) []operation {
	branch := func(name string, b Branch) operation {
		return operation{name, newSource, func(ctx context.Context, w *world, ref string) error {
			out, err := w.svc.Branch(ctx, ref, b)
			return branched(ctx, w, out, err)
		}, true, 18}
	}
	deepTwo := func(w *world) string {
		_, two := deep(w)
		return two.ID
	}
	return []operation{
		branch("branch", Branch{Tag: "made", Sync: true}),
		branch("branch without waiting", Branch{Tag: "made", NoWait: true}),
		branch("branch without freezing", Branch{Tag: "made", NoFreeze: true}),
		branch("branch that has no parent", Branch{Tag: "made", Mode: ModeFull}),
		{"fork of a sandbox", newSource, func(ctx context.Context, w *world, ref string) error {
			_, err := w.svc.Fork(ctx, Fork{Snapshot: ref, N: 2}, nil)
			return err
		}, true, 30},
		{"checkpoint", newSource, func(ctx context.Context, w *world, ref string) error {
			b, err := w.svc.Checkpoint(ctx, ref, Checkpoint{Label: "x"})
			return branched(ctx, w, b, err)
		}, true, 20},
		{"automatic checkpoint", newSource, func(ctx context.Context, w *world, ref string) error {
			e, err := w.svc.resolve(ref)
			if err == nil {
				if _, err = w.svc.ScheduleCheckpoints(ctx, ref, AutoCheckpoint{Every: time.Hour, Keep: 1}); err == nil {
					w.svc.autoCheckpoint(ctx, e, time.Now())
					if e.active(); e.snapshot().owed != "" {
						return nil // nobody thaws it any more
					}
					w.svc.autoCheckpoint(ctx, e, time.Now().Add(time.Minute)) // the one before goes
				}
			}
			return err
		}, true, 40},
		{"rollback", newSource, func(ctx context.Context, w *world, ref string) error {
			_, err := w.svc.Rollback(ctx, ref, "")
			return err
		}, false, 6},
		{"kill of a sandbox with checkpoints", newSource, func(ctx context.Context, w *world, ref string) error {
			return w.svc.Kill(ctx, ref)
		}, false, 6},
		{"compact", deepTwo, func(ctx context.Context, w *world, ref string) error {
			_, err := w.svc.CompactSnapshot(ctx, Compact{From: ref, To: "made"}, nil)
			return err
		}, false, 12},
		{"delete a chain", deepTwo, func(ctx context.Context, w *world, _ string) error {
			return w.svc.DeleteSnapshot(ctx, "base", Delete{Cascade: true})
		}, false, 12},
		{"prune", deepTwo, func(ctx context.Context, w *world, _ string) error {
			_, err := w.svc.Prune(ctx, Prune{HasKeep: true})
			return err
		}, false, 12},
		{"expiry", newSource, func(ctx context.Context, w *world, ref string) error {
			_, err := w.svc.Branch(ctx, ref, Branch{})
			return errors.Join(err, w.svc.expire(ctx, time.Now().Add(2*autoTagLife)))
		}, true, 20},
		{"rebuild", deepTwo, func(ctx context.Context, w *world, _ string) error {
			_, err := w.svc.RebuildSnapshot(ctx, "one", nil)
			return err
		}, false, 20},
		{"unpack", func(*world) string { return "" }, func(ctx context.Context, w *world, _ string) error {
			_, err := w.svc.Unpack(ctx, bytes.NewReader(pack), Unpack{Tag: "made"}, nil)
			return err
		}, false, 20},
	}
}

// TestKilledAtEachStep kills the daemon at every point of every operation that makes or
// deletes a snapshot or puts another machine in a sandbox's place. The next daemon lists
// nothing half-made, keeps nothing of it on disk, forks whatever it lists, lets a frozen
// source go on, and can do the same again.
func TestKilledAtEachStep(t *testing.T) {
	from := newWorld(t, nil)
	deep(from)
	pack := packOf(from, "two")
	for _, op := range operations(pack) {
		t.Run(op.name, func(t *testing.T) {
			t.Parallel() // most of it is waiting
			met := map[string]int{}
			for at := 0; ; at++ {
				v := &victim{world: newWorld(t, nil), at: at, clone: filepath.Join(t.TempDir(), "clone")}
				ref := op.prepare(v.world)
				v.arm()
				err := op.run(v.ctx(), v.world, ref)
				v.mu.Lock()
				killed, points := v.killed, v.points
				v.mu.Unlock()
				if !killed {
					if err != nil || at < op.least {
						t.Errorf("nothing was killed at point %d: %v", at, err)
					}
					t.Logf("%d points: %v", at, met)
					v.disarm()
					v.finish()
					return
				}
				met[points[at]]++
				v.next()
				v.checkNext(op, ref, fmt.Sprintf("%s, killed at %d, %s", op.name, at, points[at]))
				v.finish()
				if t.Failed() {
					return
				}
			}
		})
	}
}

// checkNext checks what the next daemon has, and that it can do the same again.
func (v *victim) checkNext(op operation, ref, when string) {
	v.t.Helper()
	check := func(then string) {
		v.t.Helper()
		if op.source {
			v.eventually(when+": its guest is not owed a verdict", func() bool {
				row, err := v.journal.GetSandbox(v.ctx(), ref)
				return err == nil && row.VerdictOwed == ""
			})
			if got := v.eval(ref, "v") + " " + v.exec(ref, "cat", "/data"); got != "now from base" {
				v.t.Errorf("%s, %s: the source has %q", when, then, got)
			}
		}
		v.wholeSnapshots(when + ", " + then)
	}
	check("after the restart")
	err := op.run(v.ctx(), v.world, ref)
	switch {
	case err == nil:
	case errors.Is(err, errdefs.ErrNotFound) && (strings.HasPrefix(op.name, "delete") || strings.HasPrefix(op.name, "kill")):
	case errors.Is(err, errdefs.ErrConflict) && v.done("made"):
	default:
		v.t.Errorf("%s: again: %v", when, err)
	}
	check("after doing it again")
}

// done tells whether the snapshot with a tag is there.
func (v *victim) done(tag string) bool {
	sn, err := v.svc.Snapshot(v.ctx(), tag)
	return err == nil && sn.Status == SnapshotReady
}

// wholeSnapshots checks that each listed snapshot forks and answers, or says why it
// failed, and that nothing else is on disk.
func (v *victim) wholeSnapshots(when string) {
	v.t.Helper()
	ready := map[string]bool{}
	for _, sn := range must(v.svc.Snapshots(v.ctx())) {
		switch {
		case sn.Status == SnapshotReady:
			ready[sn.ID] = true
			child := v.fork(sn.ID, 1)[0].ID
			v.eval(child, "value")
			if err := v.svc.Kill(v.ctx(), child); err != nil {
				v.t.Errorf("%s: %v", when, err)
			}
		case sn.Status != SnapshotFailed || sn.Reason == "":
			v.t.Errorf("%s: snapshot %s is %s: %q", when, sn.ID, sn.Status, sn.Reason)
		}
	}
	var mine []string
	for _, sb := range must(v.svc.Sandboxes(v.ctx())) {
		if sb.State == Lost && strings.Contains(when, "kill of a sandbox") {
			continue // its machine had ended already
		}
		if sb.State != Running {
			v.t.Errorf("%s: sandbox %s is %s: %s", when, sb.ID, sb.State, sb.Reason)
			continue
		}
		mine = append(mine, sb.machine())
		v.exec(sb.ID, "hostname")
	}
	v.svc.ending.Wait() // machines that were replaced
	if got := v.host.Running(); len(got) != len(mine) {
		v.t.Errorf("%s: machines %v, sandboxes have %v", when, got, mine)
	}
	if got := v.dirs(); len(got) != len(mine) {
		v.t.Errorf("%s: directories %v, sandboxes have %v", when, got, mine)
	}
	entries, err := os.ReadDir(filepath.Join(v.data, "snapshots"))
	if err != nil {
		v.t.Fatal(err)
	}
	for _, e := range entries {
		if ident.KindOf(e.Name()) == "" || !ready[e.Name()] {
			v.t.Errorf("%s: snapshots/%s is left", when, e.Name())
		}
	}
}
