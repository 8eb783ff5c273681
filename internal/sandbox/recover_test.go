package sandbox

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// TestRestartAdopts: all sandboxes go on over the end and the death of the daemon.
func TestRestartAdopts(t *testing.T) {
	for _, end := range []string{"in order", "killed"} {
		t.Run(end, func(t *testing.T) {
			w := newWorld(t, nil)
			w.base()
			items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1, Name: "worker"}, nil)
			if err != nil {
				t.Fatal(err)
			}
			before := append(w.fork("base", 9), items[0].Sandbox)
			for _, sb := range before {
				w.eval(sb.ID, "mine="+sb.ID)
			}
			if end == "killed" {
				w.dead()
				w.buried()
			} else {
				w.restart()
			}
			for _, sb := range before {
				got := must(w.svc.Sandbox(w.ctx(), sb.ID))
				if got.State != Running || got.PID != sb.PID || got.Receipt == nil || got.Labels[labelBatch] != sb.Labels[labelBatch] || !got.CreatedAt.Equal(sb.CreatedAt) {
					t.Errorf("before %+v, after %+v", sb, got)
				}
				if v := w.eval(sb.ID, "mine"); v != sb.ID {
					t.Errorf("sandbox %s has value %s", sb.ID, v)
				}
			}
			w.exec("worker", "hostname")
			w.consistent()
			w.wantClass(w.svc.DeleteSnapshot(w.ctx(), "base", Delete{}), errdefs.ErrConflict)
			w.fork("base", 1)
		})
	}
}

// TestRestartFindsDead: what ended while no daemon ran is told as failed, and its
// reason stays over further restarts.
func TestRestartFindsDead(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	pair := w.fork("base", 2)
	w.close()
	w.host.Crash(pair[0].ID, "killed from outside")
	w.open()
	for range 2 {
		got := must(w.svc.Sandbox(w.ctx(), pair[0].ID))
		if got.State != Failed || got.Reason == "" || got.EndedAt.IsZero() {
			t.Errorf("the dead one is %+v", got)
		}
		w.exec(pair[1].ID, "hostname")
		w.consistent()
		w.restart()
	}
}

// TestStartCancelled: a start that is given up ends no sandbox.
func TestStartCancelled(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	all := w.fork("base", 3)
	w.close()
	ctx, cancel := context.WithCancel(context.Background())
	w.script.onFault(func(op fake.Op, id string) error {
		if op == fake.OpAdopt {
			cancel()
			return ctx.Err()
		}
		return nil
	})
	if err := w.tryOpen(ctx); err == nil {
		t.Error("a cancelled start has no error")
	}
	w.script.onFault(nil)
	_ = w.driver.Close()
	_ = w.journal.Close()
	w.open()
	for _, sb := range all {
		w.exec(sb.ID, "hostname")
	}
}

// TestForkCrashes: the daemon dies at any step of a fork; the next one leaves nothing
// half-made, and what was complete before lives on.
func TestForkCrashes(t *testing.T) {
	for _, op := range []fake.Op{fake.OpRestore, fake.OpLoad, fake.OpResume, fake.OpDial} {
		for _, at := range []int32{1, 3, 6} {
			t.Run(fmt.Sprintf("%s %d", op, at), func(t *testing.T) {
				w := newWorld(t, nil)
				w.base()
				before := w.fork("base", 2)
				var n atomic.Int32
				w.script.onFault(func(step fake.Op, _ string) error {
					if step == op && n.Add(1) == at {
						w.dead()
						return errCrashed
					}
					return nil
				})
				if _, err := w.svc.Fork(context.Background(), Fork{Snapshot: "base", N: 6}, nil); err == nil {
					t.Fatal("a fork whose daemon died has no error")
				}
				w.buried()
				w.consistent()
				for _, sb := range before {
					w.exec(sb.ID, "hostname")
				}
				w.fork("base", 2)
				w.consistent()
			})
		}
	}
}

// TestCreateCrashes: the daemon dies at any step of making a snapshot; the next one
// has either the whole snapshot or nothing of it.
func TestCreateCrashes(t *testing.T) {
	var points []string
	for _, op := range []fake.Op{fake.OpBoot, fake.OpDial, fake.OpCapture, fake.OpWrite, fake.OpRestore, fake.OpLoad, fake.OpReap} {
		points = append(points, string(op))
	}
	for _, step := range []snapshot.Step{snapshot.StepSealArtifact, snapshot.StepWriteManifest, snapshot.StepSyncManifest,
		snapshot.StepSyncStaging, snapshot.StepPublish, snapshot.StepSyncPublish} {
		points = append(points, string(step))
	}
	for _, point := range points {
		t.Run(point, func(t *testing.T) {
			w := newWorld(t, nil)
			w.base()
			w.script.onFault(func(op fake.Op, _ string) error {
				if string(op) == point {
					w.dead()
					return errCrashed
				}
				return nil
			})
			w.script.onStep(func(step snapshot.Step, _ string) error {
				if string(step) == point {
					w.dead()
					return errCrashed
				}
				return nil
			})
			_, err := w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Tag: "next", Image: "debian"}, nil)
			if err == nil {
				t.Fatal("a snapshot whose daemon died was made")
			}
			w.buried()
			w.consistent()
			w.fork("base", 1)
			_, err = w.svc.Snapshot(w.ctx(), "next")
			w.wantClass(err, errdefs.ErrNotFound)
			w.create(CreateSnapshot{Tag: "next", Image: "debian"})
		})
	}
}

// TestDeleteCrashes: a snapshot is there or gone, never half.
func TestDeleteCrashes(t *testing.T) {
	for _, point := range []snapshot.Step{snapshot.StepTrash, snapshot.StepSyncTrash, snapshot.StepDelete} {
		t.Run(string(point), func(t *testing.T) {
			w := newWorld(t, nil)
			w.base()
			w.script.onStep(func(step snapshot.Step, _ string) error {
				if step == point {
					w.dead()
					return errCrashed
				}
				return nil
			})
			if err := w.svc.DeleteSnapshot(w.ctx(), "base", Delete{}); err == nil {
				t.Fatal("a deletion whose daemon died has no error")
			}
			w.buried()
			w.consistent()
			_, err := w.svc.Snapshot(w.ctx(), "base")
			w.wantClass(err, errdefs.ErrNotFound)
			w.base()
		})
	}
}

// TestDamagedSnapshotStays: a snapshot that cannot be read at a start is reported, not
// deleted, and neither it nor its dependents keep the daemon from starting.
func TestDamagedSnapshotStays(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	child := w.create(CreateSnapshot{Tag: "child", From: "base"})
	w.close()
	manifest := filepath.Join(w.data, "snapshots", base.ID, snapshot.ManifestName)
	good, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(manifest, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(manifest, good[:len(good)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	w.open()
	_, err = w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1}, nil)
	w.wantClass(err, errdefs.ErrCorrupt)
	_, err = w.svc.Fork(w.ctx(), Fork{Snapshot: "child", N: 1}, nil)
	w.wantClass(err, errdefs.ErrCorrupt)
	found := map[string]Snapshot{}
	for _, sn := range must(w.svc.Snapshots(w.ctx())) {
		found[sn.ID] = sn
	}
	if sn := found[base.ID]; sn.Status != SnapshotFailed || sn.Reason == "" || len(sn.Tags) != 1 {
		t.Errorf("the damaged snapshot is listed as %+v", sn)
	}
	if sn := found[child.ID]; sn.Status == SnapshotReady {
		t.Errorf("its child is listed as %+v", sn)
	}
	w.close()
	if err := os.WriteFile(manifest, good, 0o600); err != nil {
		t.Fatal(err)
	}
	w.open()
	w.fork("base", 1)
	w.fork("child", 1)
	w.consistent()
}

// TestSnapshotWithoutRow: files that the journal does not know are taken up; rows
// without files go.
func TestSnapshotWithoutRow(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	if err := w.journal.DeleteSnapshot(w.ctx(), base.ID); err != nil {
		t.Fatal(err)
	}
	lost := metadata.Snapshot{ID: "sn00000000000000000001", Status: string(SnapshotReady), CreatedAt: base.CreatedAt}
	if err := w.journal.PublishSnapshot(w.ctx(), lost, "lost", metadata.KeepTag); err != nil {
		t.Fatal(err)
	}
	w.restart()
	w.consistent()
	w.fork(base.ID, 1)
	_, err := w.svc.Snapshot(w.ctx(), "lost")
	w.wantClass(err, errdefs.ErrNotFound)
}

// hostileOrphans is an engine that lists what a user of the host made up.
type hostileOrphans struct {
	*fake.Driver
	ids []string
}

func (h hostileOrphans) Orphans(ctx context.Context) ([]string, error) {
	ids, err := h.Driver.Orphans(ctx)
	return append(ids, h.ids...), err
}

// TestHostileOrphans: names of processes of the host are no paths.
func TestHostileOrphans(t *testing.T) {
	var names []string
	w := newWorld(t, func(c *Config) {
		c.Engine = hostileOrphans{c.Engine.(*fake.Driver), names}
	})
	victim := filepath.Join(w.data, "victim")
	if err := os.Mkdir(victim, 0o700); err != nil {
		t.Fatal(err)
	}
	names = []string{"../victim", "", ".", "..", "sb/../../victim", "sn00000000000000000000"}
	w.restart()
	if _, err := os.Stat(victim); err != nil {
		t.Errorf("a directory outside was removed: %v", err)
	}
	if _, err := os.Stat(w.machines()); err != nil {
		t.Errorf("the directory of all sandboxes was removed: %v", err)
	}
}

var _ engine.Driver = hostileOrphans{}
