package sandbox

import (
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

// as restarts the daemon with another engine on the same data directory.
func (w *world) as(engine string) {
	w.t.Helper()
	w.engine = engine
	w.restart()
}

// killAll ends every sandbox.
func (w *world) killAll() {
	w.t.Helper()
	for _, sb := range must(w.svc.Sandboxes(w.ctx())) {
		if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
			w.t.Error(err)
		}
	}
}

// TestSnapshotsOfAnotherEngine: they stay listed with the reason, every use is
// refused with the way out, and the same tag can name one of each engine.
func TestSnapshotsOfAnotherEngine(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	w.create(CreateSnapshot{From: base.ID, Tag: "mine"})
	w.as("other")
	for _, ref := range []string{base.ID, "mine"} {
		sn := must(w.svc.Snapshot(w.ctx(), ref))
		if sn.Status != SnapshotStale || sn.Engine != "fake" || !strings.Contains(sn.Reason, "belongs to engine fake, and this daemon runs engine other") {
			t.Errorf("%s is %+v", ref, sn)
		}
		_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: ref, N: 1}, nil)
		w.wantClass(err, errdefs.ErrIncompatible)
		if hint := errdefs.Hint(err); !strings.Contains(hint, "--engine fake") || !strings.Contains(hint, "snapshot rebuild") {
			t.Errorf("hint %q", hint)
		}
		_, err = w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{From: ref}, nil)
		w.wantClass(err, errdefs.ErrIncompatible)
		_, err = w.svc.SetWarmPool(w.ctx(), ref, 1)
		w.wantClass(err, errdefs.ErrIncompatible)
	}
	// The tag of the other engine is no conflict, and goes on meaning its snapshot there.
	here := w.create(CreateSnapshot{Image: "debian", Tag: "mine"})
	if got := must(w.svc.Snapshot(w.ctx(), "mine")); got.ID != here.ID || got.Engine != "other" {
		t.Errorf("mine is %+v here", got)
	}
	_, err := w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Image: "debian", Tag: "mine"}, nil)
	w.wantClass(err, errdefs.ErrConflict)
	w.fork("mine", 1)
	w.killAll()
	w.consistent()
	w.as("fake")
	if got := must(w.svc.Snapshot(w.ctx(), "mine")); got.ID == here.ID || got.Status != SnapshotReady {
		t.Errorf("mine is %+v back there", got)
	}
	w.fork("mine", 1)
	w.killAll()
	if err := w.svc.Untag(w.ctx(), "mine"); err != nil {
		t.Fatal(err)
	}
	if got := must(w.svc.Snapshot(w.ctx(), "mine")); got.ID != here.ID {
		t.Errorf("without a tag of its own it is %+v", got)
	}
}

// TestBuiltinOfEachEngine: the second engine gets its own, and the first finds its old one.
func TestBuiltinOfEachEngine(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.AgentBuild = "one" })
	w.fork(PyBase, 1)
	w.killAll()
	first := must(w.svc.Snapshot(w.ctx(), PyBase))
	w.as("other")
	if err := w.svc.Prepare(w.ctx(), PyBase, nil); err != nil {
		t.Fatal(err)
	}
	w.fork(PyBase, 2)
	w.killAll()
	second := must(w.svc.Snapshot(w.ctx(), PyBase))
	all := must(w.svc.Snapshots(w.ctx()))
	if second.ID == first.ID || second.Engine != "other" || len(all) != 2 || w.images.builds != 1 {
		t.Errorf("%d snapshots after %d image builds, py-base was %s and is %+v", len(all), w.images.builds, first.ID, second)
	}
	w.consistent()
	w.as("fake")
	w.fork(PyBase, 1)
	w.killAll()
	if got := must(w.svc.Snapshot(w.ctx(), PyBase)); got.ID != first.ID {
		t.Errorf("py-base of the first engine is %s, was %s", got.ID, first.ID)
	}
	w.consistent()
}

// TestRebuildForAnotherEngine makes a snapshot again from its recipe beside the old one.
func TestRebuildForAnotherEngine(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	w.as("other")
	made, err := w.svc.RebuildSnapshot(w.ctx(), base.ID, nil)
	if err != nil {
		t.Fatal(err)
	}
	old := must(w.svc.Snapshot(w.ctx(), base.ID))
	if made.ID == base.ID || made.Engine != "other" || !slices.Equal(made.Tags, base.Tags) || !slices.Equal(old.Tags, base.Tags) {
		t.Errorf("made %+v, old is %+v", made, old)
	}
	w.fork(base.Tags[0], 1)
	w.killAll()
	w.consistent()
}
