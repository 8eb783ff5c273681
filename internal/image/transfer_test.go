package image

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

// send copies the parts of an image to a receiver; change may spoil one.
func send(from *Store, id string, to Receiver, change func(name string, b []byte) []byte) error {
	parts, err := from.Parts(id)
	if err != nil {
		return err
	}
	for _, p := range parts {
		b, err := os.ReadFile(p.Path)
		if err != nil {
			return err
		}
		if b = change(p.Name, b); b == nil {
			continue
		}
		f, err := to.Create(p.Name, int64(len(b)))
		if err != nil {
			return err
		}
		if f == nil {
			continue
		}
		if _, err := io.Copy(f, strings.NewReader(string(b))); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	return nil
}

// TestTransfer: an image goes from one store to another, with its kernel and, if that
// is free, its name; what is damaged on the way leaves nothing.
func TestTransfer(t *testing.T) {
	fromCfg, toCfg := testConfig(t), testConfig(t)
	from := newStore(t, fromCfg)
	k := fakeKernel(t, fromCfg)
	img, err := buildFake(t, from, k, "base", treeSource(smallTree))
	if err != nil {
		t.Fatal(err)
	}
	to := newStore(t, toCfg)
	same := func(_ string, b []byte) []byte { return b }
	receive := func(change func(string, []byte) []byte) (Image, bool, error) {
		r, err := to.Receive()
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := r.Discard(); err != nil {
				t.Error(err)
			}
		}()
		if err := send(from, img.ID, r, change); err != nil {
			return Image{}, false, err
		}
		return r.Publish(t.Context())
	}
	spoil := func(suffix string, how func([]byte) []byte) func(string, []byte) []byte {
		return func(name string, b []byte) []byte {
			if strings.HasSuffix(name, suffix) {
				return how(b)
			}
			return b
		}
	}
	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	drop := func([]byte) []byte { return nil }
	for name, change := range map[string]func(string, []byte) []byte{
		"disk changed": spoil(diskFile, flip), "disk missing": spoil(diskFile, drop),
		"manifest changed": spoil(manifestFile, flip), "manifest missing": spoil(manifestFile, drop),
		"kernel changed": spoil(vmlinuxFile, flip), "kernel missing": spoil(vmlinuxFile, drop),
		"kernel.json missing": spoil(kernelFile, drop), "module changed": spoil(".ko", flip),
	} {
		to = newStore(t, testConfig(t)) // a kernel that came whole before is not taken again
		if _, _, err := receive(change); !errors.Is(err, errdefs.ErrCorrupt) || errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
		if list, _ := to.List(); len(list) != 0 {
			t.Fatalf("%s: there is an image", name)
		}
	}
	to = newStore(t, toCfg)
	got, isNew, err := receive(same)
	if err != nil || !isNew || got.ID != img.ID || got.Name != "base" || got.Digest != img.Digest {
		t.Fatalf("received %+v, new %v, %v", got, isNew, err)
	}
	if err := to.Verify(t.Context(), img.ID); err != nil {
		t.Error(err)
	}
	if _, err := to.Root(t.Context(), img.ID); err != nil {
		t.Errorf("root of the received image: %v", err)
	}
	if _, isNew, err := receive(same); err != nil || isNew {
		t.Errorf("a second time: new %v, %v", isNew, err)
	}
	for _, dir := range []string{toCfg.Dir, toCfg.KernelDir} {
		if left, _ := filepath.Glob(filepath.Join(dir, tempPrefix+"*")); len(left) > 0 {
			t.Errorf("left are %v", left)
		}
	}
	again := newStore(t, toCfg)
	if got, err := again.Get("base"); err != nil || got.ID != img.ID {
		t.Errorf("after opening again: %+v, %v", got, err)
	}
}

// TestReceiveRefusesNames: only what belongs to one image and one kernel has a place.
func TestReceiveRefusesNames(t *testing.T) {
	s := newStore(t, testConfig(t))
	r, err := s.Receive()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Discard(); err != nil {
			t.Error(err)
		}
	}()
	id, digest := "im"+strings.Repeat("a", 20), strings.Repeat("0", 64)
	if f, err := r.Create("images/"+id+"/image.json", 1); err != nil || f.Close() != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		"images/" + id + "/other", "images/" + id + "/../x", "images/im" + strings.Repeat("b", 20) + "/image.json", "images/x/image.json",
		"kernels/" + digest + "/modules/../vmlinux", "kernels/" + digest + "/modules/.hidden", "kernels/" + digest + "/modules/", "kernels/zz/vmlinux",
		"names.json", "images", "/etc/passwd", "", "kernels/" + digest + "/modules/a/b",
	} {
		if f, err := r.Create(name, 1); !errors.Is(err, errdefs.ErrCorrupt) || f != nil {
			t.Errorf("%q: %v, %v", name, f, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := r.Publish(ctx); err == nil {
		t.Error("an image without a kernel was published")
	}
}
