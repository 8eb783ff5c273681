package sandbox

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/store/snapshot"
)

// The image of a pack in these tests is one file with the image's name.

func (f *fakeImages) Parts(id string) ([]image.Part, error) {
	img, err := f.Get(id)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(filepath.Dir(f.root.Disk), "name-of-"+id)
	return []image.Part{{Name: "images/" + id + "/name", Path: path}}, os.WriteFile(path, []byte(img.Name), 0o600)
}

func (f *fakeImages) Receive() (image.Receiver, error) { return &fakeReceiver{f: f}, nil }

type fakeReceiver struct {
	f    *fakeImages
	id   string
	path string
}

func (r *fakeReceiver) Create(name string, size int64) (*os.File, error) {
	parts := strings.Split(name, "/")
	if len(parts) != 3 || parts[0] != "images" || ident.KindOf(parts[1]) != ident.Image {
		return nil, errdefs.New(errdefs.ErrCorrupt, "there is no place for %q", name)
	}
	r.id = parts[1]
	f, err := os.CreateTemp(filepath.Dir(r.f.root.Disk), "incoming")
	if err == nil {
		r.path = f.Name()
	}
	return f, err
}

func (r *fakeReceiver) Publish(context.Context) (image.Image, bool, error) {
	if img, err := r.f.Get(r.id); err == nil {
		return img, false, nil
	}
	b, err := os.ReadFile(r.path)
	if err != nil {
		return image.Image{}, false, err
	}
	img := image.Image{ID: r.id, Name: string(b), DiskMiB: 64}
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	r.f.images["got-"+img.Name] = img
	return img, true, nil
}

func (r *fakeReceiver) Discard() error { return os.RemoveAll(r.path) }

func packOf(w *world, ref string) []byte {
	w.t.Helper()
	var out bytes.Buffer
	if err := w.svc.Pack(w.ctx(), Pack{Snapshot: ref}, &out, nil); err != nil {
		w.t.Fatal(err)
	}
	return out.Bytes()
}

// TestPack: a chain with a branch on top goes to another data directory as one file,
// forks there, and goes there again without effect.
func TestPack(t *testing.T) {
	w := newWorld(t, nil)
	_, two := deep(w)
	raw := packOf(w, "two")
	other := newWorld(t, nil)
	sn := must(other.svc.Unpack(other.ctx(), bytes.NewReader(raw), Unpack{}, nil))
	if sn.ID != two.ID || len(sn.Tags) != 1 || sn.Tags[0] != "two" || sn.Depth != 2 || sn.Labels["team"] != "x" {
		t.Errorf("unpacked is %+v", sn)
	}
	other.consistent()
	child := other.fork("two", 1)[0]
	if v, file := other.eval(child.ID, "value"), other.exec(child.ID, "cat", "/one"); v != "two" || file != "1" {
		t.Errorf("in a fork of it: %q, %q", v, file)
	}
	for _, v := range must(other.svc.Verify(other.ctx(), Verify{}, nil)) {
		if v.Err != nil {
			t.Errorf("%s %s: %v", v.Kind, v.ID, v.Err)
		}
	}
	for _, u := range []Unpack{{}, {Tag: "second"}, {Tag: "two", Force: true}} {
		must(other.svc.Unpack(other.ctx(), bytes.NewReader(raw), u, nil))
	}
	if all := must(other.svc.Snapshots(other.ctx())); len(all) != 3 {
		t.Errorf("%d snapshots after it came again", len(all))
	}
	other.restart()
	if got := other.eval(other.fork("second", 1)[0].ID, "value"); got != "two" {
		t.Errorf("after a restart: %q", got)
	}
	// Its ancestors are there now: a pack of a sibling brings only what is missing.
	sb := w.fork("one", 1)[0]
	w.eval(sb.ID, "value=three")
	must(w.svc.Branch(w.ctx(), sb.ID, Branch{Tag: "three"}))
	must(other.svc.Unpack(other.ctx(), bytes.NewReader(packOf(w, "three")), Unpack{}, nil))
	if got := other.eval(other.fork("three", 1)[0].ID, "value"); got != "three" {
		t.Errorf("the sibling: %q", got)
	}
	other.consistent()
}

// TestUnpackRefused: what cannot be is refused, and nothing is left of it.
func TestUnpackRefused(t *testing.T) {
	w := newWorld(t, nil)
	deep(w)
	raw := packOf(w, "two")
	other := newWorld(t, nil)
	mine := other.base()
	clean := func(what string) {
		t.Helper()
		other.consistent()
		if all := must(other.svc.Snapshots(other.ctx())); len(all) != 1 || all[0].ID != mine.ID {
			t.Errorf("%s left %d snapshots", what, len(all))
		}
		if images := must(other.svc.Images(other.ctx())); len(images) != 1 {
			t.Errorf("%s left %d images", what, len(images))
		}
	}
	for name, c := range map[string]struct {
		pack  []byte
		u     Unpack
		class error
	}{
		"taken tag":   {raw, Unpack{Tag: "base"}, errdefs.ErrConflict},
		"bad tag":     {raw, Unpack{Tag: "../x"}, errdefs.ErrInvalid},
		"cut":         {raw[:len(raw)-10], Unpack{}, errdefs.ErrCorrupt},
		"half":        {raw[:len(raw)/2], Unpack{}, errdefs.ErrCorrupt},
		"no pack":     {[]byte("hello"), Unpack{}, errdefs.ErrCorrupt},
		"empty":       {nil, Unpack{}, errdefs.ErrCorrupt},
		"with a tail": {append(bytes.Clone(raw), 1, 2, 3, 4), Unpack{}, errdefs.ErrCorrupt},
	} {
		_, err := other.svc.Unpack(other.ctx(), bytes.NewReader(c.pack), c.u, nil)
		if !errors.Is(err, c.class) {
			t.Errorf("%s: %v, want %v", name, err, c.class)
		}
		clean(name)
	}
	// A fault while it is made visible.
	for _, step := range []snapshot.Step{snapshot.StepSealArtifact, snapshot.StepSyncStaging} {
		n := 0
		other.script.onStep(func(s snapshot.Step, _ string) error {
			if n++; s == step && n > 5 {
				return errdefs.New(errdefs.ErrResourceExhausted, "no space")
			}
			return nil
		})
		_, err := other.svc.Unpack(other.ctx(), bytes.NewReader(raw), Unpack{}, nil)
		other.wantClass(err, errdefs.ErrResourceExhausted)
		other.script.onStep(nil)
		clean(string(step))
	}
	ctx, cancel := context.WithCancel(other.ctx())
	cancel()
	if _, err := other.svc.Unpack(ctx, bytes.NewReader(raw), Unpack{}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	clean("cancelled")
}

// TestPackSecrets: memory that may hold secrets leaves only when it is said so.
func TestPackSecrets(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	e := must(w.svc.resolve(sb.ID))
	e.update(func(sb *Sandbox) { sb.HoldsSecrets = true })
	must(w.svc.Branch(w.ctx(), sb.ID, Branch{Tag: "secret", WithSecrets: true}))
	var out bytes.Buffer
	err := w.svc.Pack(w.ctx(), Pack{Snapshot: "secret"}, &out, nil)
	if !errors.Is(err, errdefs.ErrConflict) || !strings.Contains(errdefs.Hint(err), "--with-secrets") || out.Len() > 0 {
		t.Errorf("without being asked: %v, %d bytes", err, out.Len())
	}
	if err := w.svc.Pack(w.ctx(), Pack{Snapshot: "secret", WithSecrets: true}, &out, nil); err != nil {
		t.Error(err)
	}
	if err := w.svc.Pack(w.ctx(), Pack{Snapshot: "absent"}, &out, nil); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("pack of nothing: %v", err)
	}
	other := newWorld(t, nil)
	if sn := must(other.svc.Unpack(other.ctx(), &out, Unpack{}, nil)); !sn.HoldsSecrets {
		t.Error("the mark was lost on the way")
	}
}

// TestUnpackCrash: the daemon dies at any durable step of an unpack. The next one has
// complete snapshots only, and the pack can be unpacked again.
func TestUnpackCrash(t *testing.T) {
	w := newWorld(t, nil)
	deep(w)
	raw := packOf(w, "two")
	other := newWorld(t, nil)
	at := crashes(other, func() { must(other.svc.Unpack(other.ctx(), bytes.NewReader(raw), Unpack{}, nil)) })
	if len(at) < 15 {
		t.Fatalf("only %d steps", len(at))
	}
	for _, next := range at {
		next.consistent()
		for _, sn := range must(next.svc.Snapshots(next.ctx())) {
			next.eval(next.fork(sn.ID, 1)[0].ID, "value")
		}
		must(next.svc.Unpack(next.ctx(), bytes.NewReader(raw), Unpack{}, nil))
		if got := next.eval(next.fork("two", 1)[0].ID, "value"); got != "two" {
			t.Errorf("unpacked again: %q", got)
		}
		next.finish()
	}
}

// crashes runs work and returns, for each durable step in it, the daemon that starts on
// what was on disk right after the step.
func crashes(w *world, work func()) []*world {
	w.t.Helper()
	var dirs []string
	w.script.onStep(func(snapshot.Step, string) error {
		dir := filepath.Join(w.t.TempDir(), "clone")
		dirs = append(dirs, dir)
		return os.CopyFS(dir, os.DirFS(w.data))
	})
	work()
	w.script.onStep(nil)
	var out []*world
	for _, dir := range dirs {
		next := &world{t: w.t, data: dir, host: fake.NewRegistry(), images: w.images}
		next.open()
		out = append(out, next)
	}
	return out
}
