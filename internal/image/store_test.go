package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// fakeKernel puts a kernel into the store, so that none is fetched.
func fakeKernel(t *testing.T, cfg Config) Kernel {
	t.Helper()
	k := Kernel{Release: "6.1.0-test", Package: "linux-image-test", Version: "1", CreatedAt: time.Unix(1000, 0).UTC()}
	tmp := filepath.Join(cfg.KernelDir, "new")
	if err := os.MkdirAll(filepath.Join(tmp, modulesDir), 0o755); err != nil {
		t.Fatal(err)
	}
	put := func(file string) KernelPart {
		if err := os.WriteFile(filepath.Join(tmp, file), []byte(file), 0o444); err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256([]byte(file))
		return KernelPart{file, hex.EncodeToString(sum[:])}
	}
	k.Vmlinux, k.Modules = put(vmlinuxFile), []KernelPart{put("modules/00-virtio.ko")}
	k.Digest = digestParts(k.parts())
	data, err := seal(kernelFormat, k)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tmp, kernelFile), data, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, filepath.Join(cfg.KernelDir, k.Digest)); err != nil {
		t.Fatal(err)
	}
	return k
}

// treeSource fills a directory by a function.
type treeSource func(dir string) error

func (treeSource) describe() string { return "test:tree" }
func (f treeSource) fill(_ context.Context, dir string, progress Progress) error {
	progress("filling", 0)
	return f(dir)
}

func smallTree(dir string) error {
	if err := os.Mkdir(filepath.Join(dir, "etc"), 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "etc/motd"), []byte("hello"), 0o600)
}

// buildFake builds name from src as Build does.
func buildFake(t *testing.T, s *Store, k Kernel, name string, src source) (Image, error) {
	t.Helper()
	spec := BuildSpec{Name: name, Replace: true}
	if err := s.reserve(spec); err != nil {
		return Image{}, err
	}
	defer s.unreserve(name)
	if err := s.building.acquire(t.Context()); err != nil {
		return Image{}, err
	}
	defer s.building.release()
	return s.buildFrom(t.Context(), src, Image{
		ID: ident.New(ident.Image), Name: name, Source: src.describe(), DiskMiB: minDiskMiB,
		KernelDigest: k.Digest, KernelRelease: k.Release,
	}, func(string, float64) {})
}

func TestNamesGetRemove(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	s := newStore(t, cfg)
	k := fakeKernel(t, cfg)
	first, err := buildFake(t, s, k, "base", treeSource(smallTree))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Build(t.Context(), BuildSpec{Name: "base"}, nil); !errors.Is(err, errdefs.ErrConflict) {
		t.Errorf("build of a taken name: %v, want ErrConflict", err)
	}
	second, err := buildFake(t, s, k, "base", treeSource(smallTree))
	if err != nil {
		t.Fatal(err)
	}
	check := func(s *Store) {
		t.Helper()
		for ref, want := range map[string]string{"base": second.ID, first.ID: first.ID, first.ID[:15]: first.ID, second.ID: second.ID} {
			if got, err := s.Get(ref); err != nil || got.ID != want {
				t.Errorf("Get(%s) = %s, %v; want %s", ref, got.ID, err, want)
			}
		}
		if old, _ := s.Get(first.ID); old.Name != "" {
			t.Errorf("replaced image still has the name %q", old.Name)
		}
		if list, err := s.List(); err != nil || len(list) != 2 {
			t.Errorf("List: %v, %v", list, err)
		}
	}
	check(s)
	check(newStore(t, cfg))
	if _, err := s.Get("im"); !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), first.ID) || !strings.Contains(err.Error(), second.ID) {
		t.Errorf("ambiguous reference: %v, want both candidates", err)
	}
	for _, ref := range []string{"", "../etc", "-x", strings.Repeat("a", 99)} {
		if _, err := s.Get(ref); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("Get(%q): %v, want ErrInvalid", ref, err)
		}
	}
	if err := s.Remove(t.Context(), second.ID); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Store{s, newStore(t, cfg)} {
		if _, err := s.Get("base"); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("name of a removed image: %v, want ErrNotFound", err)
		}
	}
	for _, id := range []string{second.ID, "../images", "base"} {
		if err := s.Remove(t.Context(), id); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("Remove(%s): %v, want ErrNotFound", id, err)
		}
	}
	noLeftovers(t, cfg)
}

func TestDiskKeepsAttributes(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make owners and device nodes")
	}
	cfg := testConfig(t)
	s := newStore(t, cfg)
	k := fakeKernel(t, cfg)
	img, err := buildFake(t, s, k, "attributes", treeSource(func(dir string) error {
		path := func(name string) string { return filepath.Join(dir, name) }
		return errors.Join(
			os.WriteFile(path("owned"), []byte("x"), 0o600), os.Lchown(path("owned"), 1234, 70000), os.Chmod(path("owned"), 0o640|fs.ModeSetuid),
			os.Link(path("owned"), path("linked")),
			syscall.Setxattr(path("owned"), "user.note", []byte("kept"), 0),
			syscall.Mknod(path("node"), syscall.S_IFCHR|0o620, 10<<8|229),
			os.Symlink("/etc/shadow", path("etc-shadow")),
			os.Mkdir(path("etc"), 0o755),
			// Links that lead out of the tree, where the build writes and deletes.
			os.Symlink(filepath.Join(cfg.CacheDir, "victim"), path("etc/hostname")),
			os.Symlink(cfg.CacheDir, path("tmp")),
			os.WriteFile(filepath.Join(cfg.CacheDir, "victim"), []byte("safe"), 0o600),
		)
	}))
	// A link out of the tree where a directory is to be emptied is refused.
	if err == nil {
		t.Fatalf("a tree whose /tmp leads out of it was built as %s", img.ID)
	}
	if b, readErr := os.ReadFile(filepath.Join(cfg.CacheDir, "victim")); readErr != nil || string(b) != "safe" {
		t.Fatalf("file outside of the tree: %q, %v", b, readErr)
	}
	noLeftovers(t, cfg)
}
