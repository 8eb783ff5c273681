package sandbox

import (
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// TestExpire: a branch that nobody named goes after a day; a tag, a user or a
// dependent keeps it.
func TestExpire(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.fork("base", 1)[0]
	branch := func() Snapshot { return must(w.svc.Branch(w.ctx(), source.ID, Branch{})).Snapshot }
	tagged := branch()
	if err := w.svc.TagSnapshot(w.ctx(), tagged.ID, "kept", false); err != nil {
		t.Fatal(err)
	}
	used := branch()
	child := w.fork(used.ID, 1)[0]
	plain := branch()
	named := must(w.svc.Branch(w.ctx(), source.ID, Branch{Tag: "named"})).Snapshot
	if plain.ExpiresAt.Before(time.Now().Add(23*time.Hour)) || !named.ExpiresAt.IsZero() {
		t.Errorf("expiry of an unnamed branch is %v, of a named one %v", plain.ExpiresAt, named.ExpiresAt)
	}
	left := func() map[string]bool {
		out := map[string]bool{}
		for _, sn := range must(w.svc.Snapshots(w.ctx())) {
			out[sn.ID] = true
		}
		return out
	}
	if err := w.svc.expire(w.ctx(), time.Now().Add(23*time.Hour)); err != nil || len(left()) != 5 {
		t.Errorf("before its time: %v, %d are left", err, len(left()))
	}
	later := time.Now().Add(25 * time.Hour)
	// named was captured on plain, so plain stays until named is gone.
	if err := w.svc.expire(w.ctx(), later); err != nil || !left()[plain.ID] {
		t.Errorf("one with a dependent: %v", err)
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "named", Delete{}); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.expire(w.ctx(), later); err != nil {
		t.Fatal(err)
	}
	if now := left(); now[plain.ID] || !now[tagged.ID] || !now[used.ID] {
		t.Errorf("left are %v", now)
	}
	if err := w.svc.Kill(w.ctx(), child.ID); err != nil {
		t.Fatal(err)
	}
	if err := w.svc.expire(w.ctx(), later); err != nil || left()[used.ID] {
		t.Errorf("once its user is gone: %v, %v", err, left())
	}
	w.consistent()
}

// TestBranchFrom: parent_tag must be what the sandbox was forked from.
func TestBranchFrom(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	source := w.fork("base", 1)[0]
	for _, from := range []string{"base", base.ID} {
		must(w.svc.Branch(w.ctx(), source.ID, Branch{Mode: ModeDiff, From: from}))
	}
	w.create(CreateSnapshot{Tag: "other", Image: "debian"})
	for _, from := range []string{"other", "absent"} {
		_, err := w.svc.Branch(w.ctx(), source.ID, Branch{Mode: ModeDiff, From: from})
		w.wantClass(err, errdefs.ErrInvalid)
	}
}
