package sandbox

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
)

// deep makes base <- one <- two, where two is a branch.
func deep(w *world) (one, two Snapshot) {
	w.base()
	one = w.create(CreateSnapshot{Tag: "one", From: "base", Warm: "value=one", Exec: []string{"write /one 1"}})
	sb := w.fork("one", 1)[0]
	w.eval(sb.ID, "value=two")
	two = must(w.svc.Branch(w.ctx(), sb.ID, Branch{Tag: "two", Labels: map[string]string{"team": "x"}})).Snapshot
	if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
		w.t.Fatal(err)
	}
	return one, two
}

// TestCompact: the copy has the same content without a parent, outlives its origin,
// and a failure leaves nothing.
func TestCompact(t *testing.T) {
	w := newWorld(t, nil)
	_, two := deep(w)
	for _, c := range []struct {
		Compact
		class error
	}{
		{Compact{From: "two"}, errdefs.ErrInvalid},
		{Compact{From: "two", To: "two"}, errdefs.ErrInvalid},
		{Compact{From: "two", To: "base"}, errdefs.ErrConflict},
		{Compact{From: "absent", To: "flat"}, errdefs.ErrNotFound},
		{Compact{From: "two", To: "../x"}, errdefs.ErrInvalid},
	} {
		_, err := w.svc.CompactSnapshot(w.ctx(), c.Compact, nil)
		w.wantClass(err, c.class)
	}
	broken := errors.New("no more disk")
	w.script.onFault(func(op fake.Op, id string) error {
		if op == fake.OpWrite {
			return broken
		}
		return nil
	})
	if _, err := w.svc.CompactSnapshot(w.ctx(), Compact{From: "two", To: "flat"}, nil); !errors.Is(err, broken) {
		t.Errorf("with a fault: %v", err)
	}
	w.script.onFault(nil)
	w.consistent()
	flat := must(w.svc.CompactSnapshot(w.ctx(), Compact{From: "two", To: "flat"}, nil))
	if flat.ParentID != "" || flat.Depth != 0 || flat.BranchedFrom != "compact:"+two.ID || flat.Labels["team"] != "x" {
		t.Errorf("compacted is %+v", flat)
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "base", Delete{Cascade: true}); err != nil {
		t.Fatal(err)
	}
	w.restart()
	sb := w.fork("flat", 1)[0]
	if v, file := w.eval(sb.ID, "value"), w.exec(sb.ID, "cat", "/one"); v != "two" || file != "1" {
		t.Errorf("in a fork of it: value %q, file %q", v, file)
	}
	w.consistent()
}

// TestVerify finds damage in a layer, says what can be rebuilt, and with repair keeps
// everything on it from being forked.
func TestVerify(t *testing.T) {
	w := newWorld(t, nil)
	one, two := deep(w)
	for _, v := range must(w.svc.Verify(w.ctx(), Verify{}, nil)) {
		if v.Err != nil {
			t.Errorf("%s %s: %v", v.Kind, v.ID, v.Err)
		}
	}
	if got := must(w.svc.Verify(w.ctx(), Verify{Snapshot: "one"}, nil)); len(got) != 3 {
		t.Errorf("verify of one looked at %+v", got)
	}
	flip(t, filepath.Join(one.Dir, "memory.layer"))
	w.fork("one", 1) // nobody has looked: forking does not hash
	for _, repair := range []bool{false, true} {
		found := must(w.svc.Verify(w.ctx(), Verify{Repair: repair}, nil))
		at := slices.IndexFunc(found, func(v Verified) bool { return v.ID == one.ID })
		if v := found[at]; !errors.Is(v.Err, errdefs.ErrCorrupt) || v.Rebuild == "" || v.Marked != repair {
			t.Errorf("found %+v", v)
		}
		at = slices.IndexFunc(found, func(v Verified) bool { return v.ID == two.ID })
		if v := found[at]; v.Err != nil || v.Marked != repair {
			t.Errorf("what lies on it: %+v", v)
		}
	}
	for _, ref := range []string{"one", "two"} {
		_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: ref, N: 1}, nil)
		w.wantClass(err, errdefs.ErrNotReady)
	}
	w.fork("base", 1)
	if _, err := w.svc.RebuildSnapshot(w.ctx(), "two", nil); !errors.Is(err, errdefs.ErrUnsupported) {
		t.Errorf("rebuild of a branch: %v", err)
	}
	again := must(w.svc.RebuildSnapshot(w.ctx(), "one", nil))
	if again.ID == one.ID || !slices.Equal(again.Tags, []string{"one"}) {
		t.Errorf("rebuilt is %+v", again)
	}
	if got := w.eval(w.fork("one", 1)[0].ID, "value"); got != "one" {
		t.Errorf("in a fork of the rebuilt one: %q", got)
	}
	if _, err := w.svc.Verify(w.ctx(), Verify{Snapshot: "absent"}, nil); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("verify of nothing: %v", err)
	}
}

// flip changes one byte in the middle of a read-only file, whose length stays.
func flip(t *testing.T, path string) {
	t.Helper()
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[5000] ^= 1 // in the first page of data that holds a value's length or text
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestRebuildMovesTags: the new one has all tags, the old one stays only while used.
func TestRebuildMovesTags(t *testing.T) {
	w := newWorld(t, nil)
	old := w.base()
	if err := w.svc.TagSnapshot(w.ctx(), "base", "also", false); err != nil {
		t.Fatal(err)
	}
	w.fork("base", 1)
	first := must(w.svc.RebuildSnapshot(w.ctx(), "also", nil))
	if len(first.Tags) != 2 || first.Shape != old.Shape {
		t.Errorf("rebuilt is %+v", first)
	}
	if sn := must(w.svc.Snapshot(w.ctx(), old.ID)); len(sn.Tags) != 0 || sn.Status != SnapshotReady {
		t.Errorf("the old one, in use, is %+v", sn)
	}
	must(w.svc.RebuildSnapshot(w.ctx(), "base", nil))
	if _, err := w.svc.Snapshot(w.ctx(), first.ID); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("the unused one: %v", err)
	}
}

// TestBuiltinIsRebuiltWhenStale: a built-in that this host cannot restore any more is
// made again by the next fork; another stale one is refused.
func TestBuiltinIsRebuiltWhenStale(t *testing.T) {
	w := newWorld(t, nil)
	w.images.add(pythonImage)
	first := w.fork(PyBase, 1)[0]
	w.base()
	for _, ref := range []string{PyBase, "base"} {
		sn := must(w.svc.Snapshot(w.ctx(), ref))
		row := must(w.journal.GetSnapshot(w.ctx(), sn.ID))
		row.Status, row.Reason = string(SnapshotStale), "captured elsewhere"
		if err := w.journal.PutSnapshot(w.ctx(), row); err != nil {
			t.Fatal(err)
		}
	}
	if second := w.fork(PyBase, 1)[0]; second.SnapshotID == first.SnapshotID {
		t.Error("the stale built-in was forked")
	}
	_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1}, nil)
	w.wantClass(err, errdefs.ErrNotReady)
}

// TestDiskUsage: own and shared bytes, and the sums.
func TestDiskUsage(t *testing.T) {
	w := newWorld(t, nil)
	one, two := deep(w)
	w.fork("two", 1)
	u := must(w.svc.DiskUsage(w.ctx()))
	own := map[string]int64{}
	var sum int64
	for _, s := range u.Snapshots {
		own[s.Snapshot.ID] = s.OwnBytes
		sum += s.OwnBytes
	}
	last := u.Snapshots[len(u.Snapshots)-1]
	if last.Snapshot.ID != two.ID || last.SharedBytes != own[one.ParentID]+own[one.ID] || last.OwnBytes == 0 || last.Snapshot.Sandboxes != 1 {
		t.Errorf("two is %+v", last)
	}
	if u.Snapshots[0].Dependents != 1 || u.Snapshots[0].SharedBytes != 0 {
		t.Errorf("base is %+v", u.Snapshots[0])
	}
	if u.SnapshotBytes != sum || u.FreeBytes == 0 || u.TotalBytes < u.FreeBytes || u.MinFreeBytes != DefaultMinFreeBytes || u.SandboxBytes == 0 {
		t.Errorf("sums are %+v", u)
	}
}

// TestPrune: what matches goes, children first; what is in use, built in or needed stays.
func TestPrune(t *testing.T) {
	w := newWorld(t, nil)
	_, err := w.svc.Prune(w.ctx(), Prune{})
	w.wantClass(err, errdefs.ErrInvalid)
	one, two := deep(w)
	kept := func(list []Pruned) map[string]string {
		out := map[string]string{}
		for _, p := range list {
			out[p.Snapshot.ID] = p.Kept
		}
		return out
	}
	if got := must(w.svc.Prune(w.ctx(), Prune{Older: time.Hour})); len(got) != 0 {
		t.Errorf("young ones: %+v", got)
	}
	dry := kept(must(w.svc.Prune(w.ctx(), Prune{HasKeep: true, DryRun: true})))
	if len(dry) != 3 || dry[one.ID] != "" {
		t.Errorf("dry run: %v", dry)
	}
	if all := must(w.svc.Snapshots(w.ctx())); len(all) != 3 {
		t.Errorf("a dry run left %d", len(all))
	}
	sb := w.fork("two", 1)[0]
	if got := kept(must(w.svc.Prune(w.ctx(), Prune{HasKeep: true}))); got[two.ID] == "" || got[one.ID] == "" {
		t.Errorf("with a sandbox: %v", got)
	}
	if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if got := must(w.svc.Prune(w.ctx(), Prune{Labels: map[string]string{"team": "y"}})); len(got) != 0 {
		t.Errorf("other label: %+v", got)
	}
	if got := kept(must(w.svc.Prune(w.ctx(), Prune{Labels: map[string]string{"team": ""}}))); len(got) != 1 || got[two.ID] != "" {
		t.Errorf("by label: %v", got)
	}
	if got := kept(must(w.svc.Prune(w.ctx(), Prune{Keep: 1, HasKeep: true}))); len(got) != 1 || got[one.ParentID] == "" {
		t.Errorf("keep 1: %v", got)
	}
	if got := must(w.svc.Prune(w.ctx(), Prune{HasKeep: true})); len(got) != 2 || got[0].Bytes == 0 {
		t.Errorf("all: %+v", got)
	}
	if all := must(w.svc.Snapshots(w.ctx())); len(all) != 0 {
		t.Errorf("%d are left", len(all))
	}
	w.consistent()
}

// TestMinFree: nothing that stores something starts on a disk that is nearly full,
// and the source of a capture goes on.
func TestMinFree(t *testing.T) {
	full := false
	w := newWorld(t, func(c *Config) {
		if full {
			c.MinFreeBytes = math.MaxInt64
		}
	})
	w.base()
	full = true
	w.restart()
	sb := w.fork("base", 1)[0]
	_, err := w.svc.Branch(w.ctx(), sb.ID, Branch{})
	w.wantClass(err, errdefs.ErrResourceExhausted)
	_, err = w.svc.Fork(w.ctx(), Fork{Snapshot: sb.ID, N: 1}, nil)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	_, err = w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Tag: "x", From: "base"}, nil)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	_, err = w.svc.BuildImage(w.ctx(), BuildImage{Name: "x"}, nil)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	_, err = w.svc.CompactSnapshot(w.ctx(), Compact{From: "base", To: "x"}, nil)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	if sb := must(w.svc.Sandbox(w.ctx(), sb.ID)); sb.State != Running {
		t.Errorf("the source is %s", sb.State)
	}
	w.consistent()
}

// TestBranchFull: a full branch has no parent, and the next one lies on it.
func TestBranchFull(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	full := must(w.svc.Branch(w.ctx(), sb.ID, Branch{Mode: ModeFull})).Snapshot
	next := must(w.svc.Branch(w.ctx(), sb.ID, Branch{Mode: ModeDiff})).Snapshot
	if full.ParentID != "" || full.Depth != 0 || next.ParentID != full.ID {
		t.Errorf("full has parent %q, the next %q", full.ParentID, next.ParentID)
	}
	for _, ref := range []string{full.ID, next.ID} {
		if got := w.eval(w.fork(ref, 1)[0].ID, "value"); got != "warm" {
			t.Errorf("a fork of %s has %q", ref, got)
		}
	}
	w.consistent()
}

// TestCompactCrash: the daemon dies at any durable step of compacting; nothing
// half-made is there afterwards.
func TestCompactCrash(t *testing.T) {
	w := newWorld(t, nil)
	_, two := deep(w)
	at := crashes(w, func() { must(w.svc.CompactSnapshot(w.ctx(), Compact{From: two.ID, To: "flat"}, nil)) })
	if len(at) < 5 {
		t.Fatalf("only %d steps", len(at))
	}
	for _, next := range at {
		next.consistent()
		if all := must(next.svc.Snapshots(next.ctx())); len(all) != 3 {
			t.Errorf("%d snapshots are there", len(all))
		}
		next.finish()
	}
	if got := w.eval(w.fork("flat", 1)[0].ID, "value"); got != "two" {
		t.Errorf("compacted in the end: %q", got)
	}
}
