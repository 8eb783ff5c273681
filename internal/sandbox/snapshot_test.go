package sandbox

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
)

func TestCreateSnapshot(t *testing.T) {
	w := newWorld(t, nil)
	var steps []string
	sn, err := w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{
		Tag: "base", Image: "debian", Warm: "value=warm", Exec: []string{"write /a one", "write /b two"},
		Labels: map[string]string{"k": "v"}, Shape: engine.Shape{CPUs: 2, MemoryMiB: 256, DiskMiB: 128},
	}, func(step string, _ float64) { steps = append(steps, step) })
	if err != nil {
		t.Fatal(err)
	}
	if sn.Status != SnapshotReady || !slices.Equal(sn.Tags, []string{"base"}) || sn.ImageName != "debian" || sn.Engine != "fake" ||
		sn.Shape != (engine.Shape{CPUs: 2, MemoryMiB: 256, DiskMiB: 128}) || sn.Depth != 0 || sn.MemoryBytes == 0 || sn.Labels["k"] != "v" || len(sn.Recipe.Exec) != 2 {
		t.Errorf("the snapshot is %+v", sn)
	}
	if len(steps) < 4 {
		t.Errorf("steps told: %v", steps)
	}
	child := w.create(CreateSnapshot{Tag: "child", From: "base", Exec: []string{"write /b three"}})
	if child.ParentID != sn.ID || child.Depth != 1 || child.Shape != sn.Shape || child.ImageID != sn.ImageID {
		t.Errorf("the child is %+v", child)
	}
	w.empty()
	sb := w.fork("child", 1)[0]
	if v := w.eval(sb.ID, "value"); v != "warm" {
		t.Errorf("value is %q", v)
	}
	if a, b := w.exec(sb.ID, "cat", "/a"), w.exec(sb.ID, "cat", "/b"); a != "one" || b != "three" {
		t.Errorf("/a is %q, /b is %q", a, b)
	}
	w.consistent()
}

// TestCreateFails: whatever fails, no snapshot, machine, directory or row is left.
func TestCreateFails(t *testing.T) {
	broken := errdefs.New(errdefs.ErrUnavailable, "scripted failure")
	at := func(op fake.Op) func(fake.Op, string) error {
		return func(got fake.Op, _ string) error {
			if got == op {
				return broken
			}
			return nil
		}
	}
	dies := func(string) fake.GuestFaults { return fake.GuestFaults{DieAfter: 3} }
	noPython := func(string) fake.GuestFaults { return fake.GuestFaults{NoPython: true} }
	for name, c := range map[string]struct {
		req   CreateSnapshot
		fault func(fake.Op, string) error
		guest func(string) fake.GuestFaults
		class error
	}{
		"exec fails":    {req: CreateSnapshot{Image: "debian", Exec: []string{"write /a b", "exit 1"}}, class: errdefs.ErrInvalid},
		"warm raises":   {req: CreateSnapshot{Image: "debian", Warm: "raise ValueError"}, class: errdefs.ErrInvalid},
		"no python":     {req: CreateSnapshot{Image: "debian", Warm: "x=1"}, guest: noPython, class: errdefs.ErrUnsupported},
		"guest dies":    {req: CreateSnapshot{Image: "debian", Exec: []string{"echo"}}, guest: dies, class: errdefs.ErrGuest},
		"boot":          {req: CreateSnapshot{Image: "debian"}, fault: at(fake.OpBoot), class: errdefs.ErrUnavailable},
		"capture":       {req: CreateSnapshot{Image: "debian"}, fault: at(fake.OpCapture), class: errdefs.ErrUnavailable},
		"write":         {req: CreateSnapshot{Image: "debian"}, fault: at(fake.OpWrite), class: errdefs.ErrUnavailable},
		"not restored":  {req: CreateSnapshot{Image: "debian"}, fault: at(fake.OpLoad), class: errdefs.ErrUnavailable},
		"two sources":   {req: CreateSnapshot{Image: "debian", From: "base"}, class: errdefs.ErrInvalid},
		"unknown image": {req: CreateSnapshot{Image: "nothing"}, class: errdefs.ErrNotFound},
		"unknown from":  {req: CreateSnapshot{From: "nothing"}, class: errdefs.ErrNotFound},
		"path as from":  {req: CreateSnapshot{From: "../../etc"}, class: errdefs.ErrInvalid},
		"taken tag":     {req: CreateSnapshot{Tag: "base", Image: "debian"}, class: errdefs.ErrConflict},
		"bad tag":       {req: CreateSnapshot{Tag: "../x", Image: "debian"}, class: errdefs.ErrInvalid},
		"other shape":   {req: CreateSnapshot{From: "base", Shape: engine.Shape{CPUs: 3}}, class: errdefs.ErrInvalid},
		"small disk":    {req: CreateSnapshot{Image: "debian", Shape: engine.Shape{DiskMiB: 32}}, class: errdefs.ErrInvalid},
		"nine cpus":     {req: CreateSnapshot{Image: "debian", Shape: engine.Shape{CPUs: 9}}, class: errdefs.ErrInvalid},
		"little memory": {req: CreateSnapshot{Image: "debian", Shape: engine.Shape{MemoryMiB: 1}}, class: errdefs.ErrInvalid},
		"empty command": {req: CreateSnapshot{Image: "debian", Exec: []string{""}}, class: errdefs.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			w.base()
			w.script.onFault(c.fault)
			w.script.onGuest(c.guest)
			if c.req.Tag == "" {
				c.req.Tag = "next"
			}
			_, err := w.svc.CreateSnapshot(w.ctx(), c.req, nil)
			w.wantClass(err, c.class)
			w.empty()
			w.consistent()
			if all := must(w.svc.Snapshots(w.ctx())); len(all) != 1 {
				t.Errorf("there are %d snapshots", len(all))
			}
		})
	}
}

func TestCreateWithoutPython(t *testing.T) {
	w := newWorld(t, nil)
	w.script.onGuest(func(string) fake.GuestFaults { return fake.GuestFaults{NoPython: true} })
	w.create(CreateSnapshot{Tag: "plain", Image: "debian", Exec: []string{"write /a b"}})
	if got := w.exec(w.fork("plain", 1)[0].ID, "cat", "/a"); got != "b" {
		t.Errorf("/a is %q", got)
	}
}

func TestCreateCancelled(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	for _, call := range []string{"hello", "boot", "warm", "exec", "ping", "prepare", "commit"} {
		ctx, cancel := context.WithCancel(w.ctx())
		w.script.onGuest(func(string) fake.GuestFaults {
			return fake.GuestFaults{Hold: func(at string) <-chan struct{} {
				if at != call {
					return nil
				}
				cancel()
				return make(chan struct{})
			}}
		})
		_, err := w.svc.CreateSnapshot(ctx, CreateSnapshot{Tag: "next", Image: "debian", Warm: "a=b", Exec: []string{"echo"}}, nil)
		if errdefs.Class(err) != errdefs.ErrCanceled {
			t.Errorf("given up in %s: error is %v", call, err)
		}
		w.empty()
		w.consistent()
	}
}

func TestReplaceTag(t *testing.T) {
	w := newWorld(t, nil)
	first := w.base()
	second := w.create(CreateSnapshot{Tag: "base", Replace: true, Image: "debian"})
	if got := must(w.svc.Snapshot(w.ctx(), "base")); got.ID != second.ID {
		t.Errorf("the tag leads to %s", got.ID)
	}
	if got := must(w.svc.Snapshot(w.ctx(), first.ID)); len(got.Tags) != 0 {
		t.Errorf("the first has tags %v", got.Tags)
	}
	// The tag may be taken while the snapshot is being made.
	_, err := w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Tag: "race", Image: "debian"}, func(step string, _ float64) {
		if step == "capturing" {
			if err := w.svc.TagSnapshot(w.ctx(), first.ID, "race", false); err != nil {
				t.Error(err)
			}
		}
	})
	w.wantClass(err, errdefs.ErrConflict)
	w.consistent()
}

func TestTags(t *testing.T) {
	w := newWorld(t, nil)
	a := w.base()
	b := w.create(CreateSnapshot{Image: "debian"})
	if err := w.svc.TagSnapshot(w.ctx(), "base", "also", false); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.TagSnapshot(w.ctx(), "base", "also", false); err != nil {
		t.Errorf("the same tag again: %v", err)
	}
	w.wantClass(w.svc.TagSnapshot(w.ctx(), b.ID, "also", false), errdefs.ErrConflict)
	if err := w.svc.TagSnapshot(w.ctx(), b.ID, "also", true); err != nil {
		t.Fatal(err)
	}
	if got := must(w.svc.Snapshot(w.ctx(), "also")); got.ID != b.ID {
		t.Errorf("the tag leads to %s", got.ID)
	}
	w.wantClass(w.svc.TagSnapshot(w.ctx(), "nothing", "x", false), errdefs.ErrNotFound)
	w.wantClass(w.svc.TagSnapshot(w.ctx(), a.ID, "a b", false), errdefs.ErrInvalid)
	w.wantClass(w.svc.TagSnapshot(w.ctx(), a.ID, a.ID, false), errdefs.ErrInvalid)
	w.wantClass(w.svc.Untag(w.ctx(), "nothing"), errdefs.ErrNotFound)
	if err := w.svc.Untag(w.ctx(), "also"); err != nil {
		t.Fatal(err)
	}
	w.fork(b.ID, 1)
	_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "also", N: 1}, nil)
	w.wantClass(err, errdefs.ErrNotFound)
}

func TestDeleteSnapshot(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	w.create(CreateSnapshot{Tag: "one", From: "base"})
	w.create(CreateSnapshot{Tag: "two", From: "one"})
	w.create(CreateSnapshot{Tag: "three", From: "two"})
	w.create(CreateSnapshot{Tag: "side", From: "one"})
	sb := w.fork("three", 1)[0]
	w.wantClass(w.svc.DeleteSnapshot(w.ctx(), "one", Delete{}), errdefs.ErrConflict)
	w.wantClass(w.svc.DeleteSnapshot(w.ctx(), "three", Delete{}), errdefs.ErrConflict)
	w.wantClass(w.svc.DeleteSnapshot(w.ctx(), "base", Delete{Cascade: true}), errdefs.ErrConflict)
	w.wantClass(w.svc.DeleteSnapshot(w.ctx(), "base", Delete{Cascade: true, Force: true}), errdefs.ErrInvalid)
	w.wantClass(w.svc.DeleteSnapshot(w.ctx(), "nothing", Delete{}), errdefs.ErrNotFound)
	if n := len(must(w.svc.Snapshots(w.ctx()))); n != 5 {
		t.Fatalf("%d snapshots are left by refused deletions", n)
	}
	w.exec(sb.ID, "hostname")
	if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "side", Delete{}); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "one", Delete{Cascade: true}); err != nil {
		t.Fatal(err)
	}
	if all := must(w.svc.Snapshots(w.ctx())); len(all) != 1 || all[0].Tags[0] != "base" {
		t.Errorf("left are %+v", all)
	}
	w.consistent()
	w.fork("base", 1)
}

// TestDeleteAgainstForks: a snapshot that is deleted while it is forked is either
// forked or gone.
func TestDeleteAgainstForks(t *testing.T) {
	w := newWorld(t, nil)
	for range 10 {
		w.base()
		var wg sync.WaitGroup
		var deleted atomic.Bool
		for range 4 {
			wg.Go(func() {
				_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 2}, nil)
				if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
					t.Error(err)
				}
			})
		}
		wg.Go(func() {
			err := w.svc.DeleteSnapshot(w.ctx(), "base", Delete{})
			deleted.Store(err == nil)
			if err != nil && !errors.Is(err, errdefs.ErrConflict) {
				t.Error(err)
			}
		})
		wg.Wait()
		w.consistent()
		for _, sb := range must(w.svc.Sandboxes(w.ctx())) {
			w.exec(sb.ID, "cat", "/data")
			if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
				t.Error(err)
			}
		}
		if !deleted.Load() {
			if err := w.svc.DeleteSnapshot(w.ctx(), "base", Delete{}); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestImageInUse(t *testing.T) {
	w := newWorld(t, nil)
	sn := w.base()
	w.wantClass(w.svc.RemoveImage(w.ctx(), "debian"), errdefs.ErrConflict)
	if img := must(w.svc.Image(w.ctx(), "debian")); !slices.Equal(img.UsedBy, []string{sn.ID}) {
		t.Errorf("the image is used by %v", img.UsedBy)
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "base", Delete{}); err != nil {
		t.Fatal(err)
	}
	// A snapshot that is being made uses it too.
	_, err := w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Tag: "base", Image: "debian"}, func(step string, _ float64) {
		if step == "capturing" {
			w.wantClass(w.svc.RemoveImage(w.ctx(), "debian"), errdefs.ErrConflict)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "base", Delete{}); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.RemoveImage(w.ctx(), "debian"); err != nil {
		t.Fatal(err)
	}
	w.wantClass(w.svc.RemoveImage(w.ctx(), "debian"), errdefs.ErrNotFound)
}

// TestStaleSnapshot: one of another build of the engine is listed as stale and not forked.
func TestStaleSnapshot(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	w.svc.cfg.Engine = otherBuild{w.driver}
	sn := must(w.svc.Snapshot(w.ctx(), "base"))
	if sn.Status != SnapshotStale || sn.Reason == "" {
		t.Errorf("the snapshot is %s: %s", sn.Status, sn.Reason)
	}
	_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1}, nil)
	w.wantClass(err, errdefs.ErrNotReady)
	w.svc.cfg.Engine = w.driver
}

type otherBuild struct{ *fake.Driver }

func (otherBuild) CheckCompat(engine.Compat) error {
	return errdefs.New(errdefs.ErrIncompatible, "it was captured by another build")
}
