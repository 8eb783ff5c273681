package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/layerfmt"
)

func openStore(t testing.TB, c Config) *Store {
	t.Helper()
	s, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// fill writes a memory layer and a device state and returns their manifest.
func fill(dir, id, parent string) (Manifest, error) {
	m := sampleManifest()
	m.ID, m.ParentID, m.Artifacts = id, parent, nil
	f, err := os.Create(filepath.Join(dir, "memory.layer"))
	if err != nil {
		return m, err
	}
	defer f.Close()
	w, err := layerfmt.NewWriter(f, layerfmt.Header{Units: 8, Parent: parent})
	if err != nil {
		return m, err
	}
	page := []byte(strings.Repeat(id, 4096)[:4096])
	if err := errors.Join(w.Data(1, page), w.Zero(3, 2), w.Close()); err != nil {
		return m, err
	}
	m.Artifacts = []Artifact{
		{Artifact: engine.Artifact{Name: "memory.layer", Kind: "memory", Format: layerfmt.Format}},
		{Artifact: engine.Artifact{Name: "device.state", Kind: "device", Format: "fake"}},
	}
	return m, os.WriteFile(filepath.Join(dir, "device.state"), []byte("state of "+id), 0o600)
}

func publish(ctx context.Context, s *Store, id, parent string) error {
	st, err := s.Stage(id)
	if err != nil {
		return err
	}
	m, err := fill(st.Dir(), id, parent)
	if err == nil {
		_, err = st.Publish(ctx, m)
	}
	if errors.Is(err, errCrash) {
		return err // a dead process discards nothing
	}
	return errors.Join(err, st.Discard())
}

func mustPublish(t testing.TB, s *Store, id, parent string) {
	t.Helper()
	if err := publish(t.Context(), s, id, parent); err != nil {
		t.Fatal(err)
	}
}

func ids(all []Manifest) []string {
	out := []string{}
	for _, m := range all {
		out = append(out, m.ID)
	}
	return out
}

func TestPublishAndReopen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "snapshots")
	s := openStore(t, Config{Dir: dir, FileMode: 0o444})
	mustPublish(t, s, rootID, "")
	mustPublish(t, s, childID, rootID)
	for range 2 { // as published, and as read again
		chain, err := s.Chain(childID)
		if err != nil || !reflect.DeepEqual(ids(chain), []string{rootID, childID}) {
			t.Fatalf("chain %v (%v)", ids(chain), err)
		}
		states, err := s.States(childID)
		if err != nil || len(states) != 2 || states[1].Dir != filepath.Join(dir, childID) || states[0].Artifacts[0].Name != "memory.layer" {
			t.Errorf("states %+v (%v)", states, err)
		}
		if deps := s.Dependents(rootID); !reflect.DeepEqual(deps, []string{childID}) {
			t.Errorf("dependents %v", deps)
		}
		for _, m := range s.List() {
			if err := s.Verify(t.Context(), m.ID); err != nil {
				t.Error(err)
			}
			for _, a := range m.Artifacts {
				info, err := os.Stat(filepath.Join(s.Dir(m.ID), a.Name))
				if err != nil || info.Mode() != 0o444 || info.Size() != a.Size || a.Bytes == 0 {
					t.Errorf("artifact %+v: %v %v", a, info.Mode(), err)
				}
			}
		}
		before, err := s.Get(childID)
		if err != nil {
			t.Fatal(err)
		}
		s = openStore(t, Config{Dir: dir, FileMode: 0o444})
		if after, err := s.Get(childID); err != nil || !reflect.DeepEqual(before, after) {
			t.Errorf("%+v (%v) was %+v", after, err, before)
		}
	}
	if info, err := os.Stat(s.Dir(childID)); err != nil || info.Mode().Perm() != 0o711 {
		t.Errorf("directory: %v %v", info.Mode(), err)
	}
	_, err := s.Get(ident.New(ident.Snapshot))
	wantClass(t, err, errdefs.ErrNotFound)
	_, err = s.Chain("../../etc")
	wantClass(t, err, errdefs.ErrNotFound)
}

func TestStageRefuses(t *testing.T) {
	s := openStore(t, Config{Dir: t.TempDir()})
	mustPublish(t, s, rootID, "")
	_, err := s.Stage(rootID)
	wantClass(t, err, errdefs.ErrConflict)
	_, err = s.Stage("../x")
	wantClass(t, err, errdefs.ErrInvalid)
	st, err := s.Stage(childID)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Stage(childID)
	wantClass(t, err, errdefs.ErrConflict)
	wantClass(t, s.Remove(t.Context(), childID), errdefs.ErrConflict)
	if err := errors.Join(st.Discard(), st.Discard()); err != nil {
		t.Error(err)
	}
	_, err = st.Publish(t.Context(), Manifest{})
	wantClass(t, err, errdefs.ErrConflict)
	mustPublish(t, s, childID, rootID)
	for _, c := range []Config{{}, {Dir: t.TempDir(), FileMode: 0o666}} {
		_, err := Open(c)
		wantClass(t, err, errdefs.ErrInvalid)
	}
}

func TestPublishRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(dir string, m *Manifest) error
		want   error
	}{
		"other id":       {func(_ string, m *Manifest) error { m.ID = ident.New(ident.Snapshot); return nil }, errdefs.ErrInvalid},
		"missing parent": {func(_ string, m *Manifest) error { m.ParentID = ident.New(ident.Snapshot); return nil }, errdefs.ErrNotFound},
		"other engine":   {func(_ string, m *Manifest) error { m.Compat.Engine = "kvm"; return nil }, errdefs.ErrInvalid},
		"other shape":    {func(_ string, m *Manifest) error { m.Shape.CPUs++; return nil }, errdefs.ErrInvalid},
		"other image":    {func(_ string, m *Manifest) error { m.Image.ID = ""; return nil }, errdefs.ErrInvalid},
		"bad manifest":   {func(_ string, m *Manifest) error { m.Disk = "x"; return nil }, errdefs.ErrInvalid},
		"wrong size":     {func(_ string, m *Manifest) error { m.Artifacts[1].Size = 1; return nil }, errdefs.ErrInvalid},
		"path":           {func(_ string, m *Manifest) error { m.Artifacts[1].Name = "../x"; return nil }, errdefs.ErrInvalid},
		"missing file":   {func(dir string, _ *Manifest) error { return os.Remove(filepath.Join(dir, "device.state")) }, errdefs.ErrInvalid},
		"unlisted file":  {func(dir string, _ *Manifest) error { return os.WriteFile(filepath.Join(dir, "tmp"), nil, 0o600) }, errdefs.ErrInvalid},
		"third link": {func(dir string, _ *Manifest) error {
			outside := filepath.Dir(filepath.Dir(dir))
			return errors.Join(os.Link(filepath.Join(dir, "device.state"), filepath.Join(outside, "other")),
				os.Link(filepath.Join(dir, "device.state"), filepath.Join(outside, "another")))
		}, errdefs.ErrInvalid},
		"symbolic link": {func(dir string, _ *Manifest) error {
			path := filepath.Join(dir, "device.state")
			return errors.Join(os.Remove(path), os.Symlink("/etc/passwd", path))
		}, errdefs.ErrInvalid},
		"pipe": {func(dir string, _ *Manifest) error {
			path := filepath.Join(dir, "device.state")
			return errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600))
		}, errdefs.ErrInvalid},
		"root layer is allowed": {func(dir string, m *Manifest) error {
			_, err := fill(dir, m.ID, "")
			return err
		}, nil},
		"layer of another parent": {func(dir string, m *Manifest) error {
			_, err := fill(dir, m.ID, ident.New(ident.Snapshot))
			return err
		}, errdefs.ErrCorrupt},
		"damaged layer": {func(dir string, m *Manifest) error {
			return os.Truncate(filepath.Join(dir, "memory.layer"), 5000)
		}, errdefs.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, Config{Dir: filepath.Join(t.TempDir(), "s")})
			mustPublish(t, s, rootID, "")
			st, err := s.Stage(childID)
			if err != nil {
				t.Fatal(err)
			}
			m, err := fill(st.Dir(), childID, rootID)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.change(st.Dir(), &m); err != nil {
				t.Fatal(err)
			}
			_, err = st.Publish(t.Context(), m)
			wantClass(t, err, c.want)
			if _, err := s.Get(childID); (err == nil) != (c.want == nil) {
				t.Errorf("listed: %v", err)
			}
			if err := st.Discard(); err != nil {
				t.Error(err)
			}
			if c.want != nil {
				mustPublish(t, s, childID, rootID) // the id is free again
			}
		})
	}
}

// TestSealedFilesAreShared: a file that was sealed as part of one snapshot can be part
// of others, as disk layers of captures that follow one another are.
func TestSealedFilesAreShared(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, Config{Dir: dir})
	keep := filepath.Join(filepath.Dir(dir), "kept")
	for i, id := range []string{ident.New(ident.Snapshot), ident.New(ident.Snapshot), ident.New(ident.Snapshot), ident.New(ident.Snapshot)} {
		st, err := s.Stage(id)
		if err != nil {
			t.Fatal(err)
		}
		m, err := fill(st.Dir(), id, "")
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(st.Dir(), "device.state")
		if i == 0 {
			err = os.Link(file, keep)
		} else {
			err = errors.Join(os.Remove(file), os.Link(keep, file))
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Publish(t.Context(), m); err != nil {
			t.Errorf("snapshot %d: %v", i, err)
		}
	}
}

func TestPublishCanBeRepeated(t *testing.T) {
	s := openStore(t, Config{Dir: t.TempDir()})
	st, err := s.Stage(rootID)
	if err != nil {
		t.Fatal(err)
	}
	m, err := fill(st.Dir(), rootID, "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = st.Publish(ctx, m)
	wantClass(t, err, errdefs.ErrCanceled)
	if len(s.List()) != 0 {
		t.Error("a canceled publish is listed")
	}
	if _, err := st.Publish(t.Context(), m); err != nil {
		t.Error(err)
	}
}

func TestRemove(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, Config{Dir: dir})
	mustPublish(t, s, rootID, "")
	mustPublish(t, s, childID, rootID)
	grandchild := ident.New(ident.Checkpoint)
	mustPublish(t, s, grandchild, childID)

	err := s.Remove(t.Context(), rootID)
	wantClass(t, err, errdefs.ErrConflict)
	if !strings.Contains(err.Error(), childID) || errdefs.Hint(err) == "" {
		t.Errorf("%v does not name the dependent or has no hint", err)
	}
	if got := s.Descendants(rootID); !reflect.DeepEqual(got, []string{grandchild, childID}) {
		t.Errorf("descendants %v", got)
	}
	var releases []func()
	for _, holder := range []string{"sb1", "sb2", "sb2"} {
		release, err := s.Lease(grandchild, holder)
		if err != nil {
			t.Fatal(err)
		}
		releases = append(releases, release)
	}
	err = s.Remove(t.Context(), grandchild)
	wantClass(t, err, errdefs.ErrConflict)
	if !strings.Contains(err.Error(), "in use by 2 sandboxes") {
		t.Errorf("message %v", err)
	}
	releases[0]()
	releases[1]()
	releases[1]() // counts once
	if got := s.Holders(grandchild); !reflect.DeepEqual(got, []string{"sb2"}) {
		t.Errorf("holders %v", got)
	}
	releases[2]()
	for _, id := range append(s.Descendants(rootID), rootID) {
		if err := s.Remove(t.Context(), id); err != nil {
			t.Error(err)
		}
		wantClass(t, s.Remove(t.Context(), id), errdefs.ErrNotFound)
		_, err := s.Lease(id, "x")
		wantClass(t, err, errdefs.ErrNotFound)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

func TestVerifyFindsDamage(t *testing.T) {
	for name, damage := range map[string]func(dir string) error{
		"a bit": func(dir string) error { return poke(filepath.Join(dir, "memory.layer"), 4100) },
		"length": func(dir string) error {
			return os.Truncate(filepath.Join(dir, "device.state"), 3)
		},
		"missing":  func(dir string) error { return os.Remove(filepath.Join(dir, "device.state")) },
		"manifest": func(dir string) error { return poke(filepath.Join(dir, ManifestName), 50) },
		"replaced": func(dir string) error {
			m := sampleManifest()
			_, b, err := encodeManifest(m)
			return errors.Join(err, os.WriteFile(filepath.Join(dir, ManifestName), b, 0o400))
		},
		"extra": func(dir string) error { return os.WriteFile(filepath.Join(dir, "x"), nil, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, Config{Dir: t.TempDir()})
			mustPublish(t, s, rootID, "")
			if err := os.Chmod(s.Dir(rootID), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := damage(s.Dir(rootID)); err != nil {
				t.Fatal(err)
			}
			wantClass(t, s.Verify(t.Context(), rootID), errdefs.ErrCorrupt)
		})
	}
	s := openStore(t, Config{Dir: t.TempDir()})
	mustPublish(t, s, rootID, "")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantClass(t, s.Verify(ctx, rootID), errdefs.ErrCanceled)
}

// poke flips a bit of a file, whatever its mode.
func poke(path string, at int64) error {
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		return err
	}
	b[0] ^= 1
	_, err = f.WriteAt(b[:], at)
	return err
}

// TestBroken: what cannot be read is not listed, protects its parent, can be removed.
func TestBroken(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, Config{Dir: dir})
	mustPublish(t, s, rootID, "")
	mustPublish(t, s, childID, rootID)
	path := filepath.Join(dir, childID, ManifestName)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, resum(t, b, `"version": 1`, `"version": 2`), 0o600)); err != nil {
		t.Fatal(err)
	}
	empty := ident.New(ident.Snapshot)
	if err := errors.Join(os.Mkdir(filepath.Join(dir, empty), 0o700), os.Mkdir(filepath.Join(dir, "lost+found"), 0o700)); err != nil {
		t.Fatal(err)
	}
	s = openStore(t, Config{Dir: dir})
	if got := ids(s.List()); !reflect.DeepEqual(got, []string{rootID}) {
		t.Errorf("listed: %v", got)
	}
	broken := s.Broken()
	if len(broken) != 2 {
		t.Errorf("broken: %v", broken)
	}
	wantClass(t, broken[childID], errdefs.ErrIncompatible)
	wantClass(t, broken[empty], errdefs.ErrCorrupt)
	_, err = s.Get(childID)
	wantClass(t, err, errdefs.ErrIncompatible)
	_, err = s.Stage(childID)
	wantClass(t, err, errdefs.ErrConflict)
	wantClass(t, s.Remove(t.Context(), rootID), errdefs.ErrConflict)
	for _, id := range []string{empty, childID, rootID} {
		if err := s.Remove(t.Context(), id); err != nil {
			t.Error(err)
		}
	}
}

func TestChainDamage(t *testing.T) {
	s := openStore(t, Config{Dir: t.TempDir()})
	id := func(i int) string { return fmt.Sprintf("sn%020d", i) }
	for i := range maxDepth + 1 {
		m := Manifest{ID: id(i), ParentID: id(i - 1)}
		if i == 0 {
			m.ParentID = ""
		}
		s.ready[m.ID] = m
	}
	if chain, err := s.Chain(id(maxDepth - 1)); err != nil || len(chain) != maxDepth || chain[0].ID != id(0) {
		t.Errorf("deepest chain: %d %v", len(chain), err)
	}
	_, err := s.Chain(id(maxDepth))
	wantClass(t, err, errdefs.ErrCorrupt)
	s.ready[id(0)] = Manifest{ID: id(0), ParentID: id(5)}
	_, err = s.Chain(id(3))
	wantClass(t, err, errdefs.ErrCorrupt)
	if got := s.Descendants(id(0)); len(got) != maxDepth {
		t.Errorf("%d descendants in a circle", len(got))
	}
	s.ready[id(0)] = Manifest{ID: id(0), ParentID: childID}
	_, err = s.Chain(id(3))
	wantClass(t, err, errdefs.ErrCorrupt)
}

// TestConcurrent publishes, leases, verifies and removes at once: whoever has a
// lease always finds the whole chain on disk.
func TestConcurrent(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, Config{Dir: dir})
	mustPublish(t, s, rootID, "")
	release, err := s.Lease(rootID, "test") // the makers always find a parent
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(300 * time.Millisecond)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { // each makes children of whatever exists
			for time.Now().Before(deadline) {
				all := s.List()
				parent := all[int(ident.New(ident.Snapshot)[5])%len(all)].ID
				err := publish(t.Context(), s, ident.New(ident.Snapshot), parent)
				if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
					t.Error(err)
				}
			}
		})
		wg.Go(func() { // each removes whatever it may
			for time.Now().Before(deadline) {
				for _, m := range s.List() {
					err := s.Remove(t.Context(), m.ID)
					if err != nil && !errors.Is(err, errdefs.ErrConflict) && !errors.Is(err, errdefs.ErrNotFound) {
						t.Error(err)
					}
				}
			}
		})
		wg.Go(func() {
			for time.Now().Before(deadline) {
				for _, m := range s.List() {
					useLeased(t, s, m.ID)
				}
			}
		})
	}
	wg.Wait()
	release()
	if len(s.busy) != 0 || len(s.leases) != 0 {
		t.Errorf("left: busy %v, leases %v", s.busy, s.leases)
	}
	again := openStore(t, Config{Dir: dir})
	if !reflect.DeepEqual(ids(again.List()), ids(s.List())) || len(again.Broken()) != 0 {
		t.Errorf("on disk %v, in memory %v, broken %v", ids(again.List()), ids(s.List()), again.Broken())
	}
}

func useLeased(t *testing.T, s *Store, id string) {
	release, err := s.Lease(id, "user")
	if errors.Is(err, errdefs.ErrNotFound) {
		return
	}
	if err != nil {
		t.Error(err)
		return
	}
	defer release()
	chain, err := s.Chain(id)
	if err != nil {
		t.Error(err)
		return
	}
	for _, m := range chain {
		if err := s.Verify(t.Context(), m.ID); err != nil {
			t.Error(err)
		}
	}
}
