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

func (treeSource) describe() string       { return "test:tree" }
func (treeSource) check() error           { return nil }
func (treeSource) clean(dir string) error { return cleanTree(dir) }
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

// TestDiskKeepsAttributes builds a disk of a tree with everything a file can have.
func TestDiskKeepsAttributes(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make owners and device nodes")
	}
	cfg := testConfig(t)
	s := newStore(t, cfg)
	victim := filepath.Join(cfg.CacheDir, "victim")
	if err := os.WriteFile(victim, []byte("safe"), 0o600); err != nil {
		t.Fatal(err)
	}
	img, err := buildFake(t, s, fakeKernel(t, cfg), "attributes", treeSource(func(dir string) error {
		path := func(name string) string { return filepath.Join(dir, name) }
		return errors.Join(
			os.Mkdir(path("etc"), 0o755), os.Mkdir(path("tmp"), 0o755), os.Chmod(path("tmp"), 0o777|fs.ModeSticky),
			os.WriteFile(path("owned"), []byte("x"), 0o600), os.Lchown(path("owned"), 1234, 70000), os.Chmod(path("owned"), 0o640|fs.ModeSetuid),
			os.Link(path("owned"), path("linked")),
			syscall.Setxattr(path("owned"), "user.note", []byte("kept"), 0),
			syscall.Mknod(path("node"), syscall.S_IFCHR|0o600, 10<<8|229), os.Chmod(path("node"), 0o620),
			os.Symlink("/etc/shadow", path("link")),
			os.WriteFile(path("tmp/rubbish"), []byte("x"), 0o600),
			os.Symlink(victim, path("etc/hostname")), // where the build writes
			os.Symlink(victim, path("tmp/link")),     // what the build deletes
		)
	}))
	if err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(s.imageDir(img.ID), diskFile)
	fsck(t, disk)
	wantStat(t, disk, "/owned", "Mode: 04640", "User: 1234 Group: 70000", "Links: 2", `user.note (4) = "kept"`)
	wantStat(t, disk, "/node", "Type: character special", "Mode: 0620", "major/minor number: 10:229")
	wantStat(t, disk, "/link", "Type: symlink", `Fast link dest: "/etc/shadow"`)
	wantStat(t, disk, "/tmp", "Mode: 01777", "Links: 2")
	wantStat(t, disk, "/etc/hostname", "Type: regular", "Mode: 0644")
	if out := debugfs(t, disk, "ls /tmp"); strings.Contains(out, "rubbish") || strings.Contains(out, "link") {
		t.Errorf("/tmp was not emptied: %s", out)
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "safe" {
		t.Errorf("file outside of the tree: %q, %v", b, err)
	}
}

// TestTreeCannotLeadOut has links out of the tree where directories are emptied.
func TestTreeCannotLeadOut(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	s := newStore(t, cfg)
	k := fakeKernel(t, cfg)
	victim := filepath.Join(cfg.CacheDir, "victim")
	if err := os.WriteFile(victim, []byte("safe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"tmp", "etc", "var"} {
		_, err := buildFake(t, s, k, "evil", treeSource(func(dir string) error {
			return os.Symlink(cfg.CacheDir, filepath.Join(dir, name))
		}))
		if err == nil {
			t.Errorf("a tree whose %s leads out of it was built", name)
		}
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "safe" {
		t.Errorf("file outside of the tree: %q, %v", b, err)
	}
	noLeftovers(t, cfg)
}

func TestFailedBuildsLeaveNothing(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	s := newStore(t, cfg)
	k := fakeKernel(t, cfg)
	big := func(dir string) error {
		for i := range 9 {
			if err := os.WriteFile(filepath.Join(dir, "random"+string(rune('0'+i))), make([]byte, 60<<20), 0o600); err != nil {
				return err
			}
		}
		return nil
	}
	if _, err := buildFake(t, s, k, "big", treeSource(big)); !errors.Is(err, errdefs.ErrInvalid) || errdefs.Hint(err) == "" {
		t.Errorf("tree larger than its disk: %v, want ErrInvalid with a hint", err)
	}
	boom := errors.New("boom")
	if _, err := buildFake(t, s, k, "big", treeSource(func(string) error { return boom })); !errors.Is(err, boom) {
		t.Errorf("failing source: %v", err)
	}
	if _, err := s.Get("big"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("image after failed builds: %v", err)
	}
	noLeftovers(t, cfg)
	if _, err := buildFake(t, s, k, "big", treeSource(smallTree)); err != nil {
		t.Errorf("the name cannot be used after failed builds: %v", err)
	}
}

// TestFullDiskIsExhausted writes a disk where there is no room for it.
func TestFullDiskIsExhausted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a small file system")
	}
	dir, tree := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(tree, "data"), []byte(strings.Repeat("data", 4<<20)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(dir, syscall.MNT_DETACH)
	err := makeDisk(t.Context(), tree, filepath.Join(dir, diskFile), minDiskMiB)
	if !errors.Is(err, errdefs.ErrResourceExhausted) || errdefs.Hint(err) == "" {
		t.Errorf("full host disk: %v, want ErrResourceExhausted with a hint", err)
	}
}

// TestCrashes opens the store as a crash at each step would leave it.
func TestCrashes(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	s := newStore(t, cfg)
	k := fakeKernel(t, cfg)
	old, err := buildFake(t, s, k, "base", treeSource(smallTree))
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(s.namesFile())
	if err != nil {
		t.Fatal(err)
	}
	img, err := buildFake(t, s, k, "base", treeSource(smallTree))
	if err != nil {
		t.Fatal(err)
	}
	mark := filepath.Join(s.imageDir(img.ID), unnamedFile)
	if _, err := os.Lstat(mark); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("mark of a named image: %v", err)
	}
	// After the image was published, before its name was stored.
	for path, data := range map[string][]byte{
		mark: nil, s.namesFile(): before,
		filepath.Join(cfg.Dir, tempPrefix+"names.json"):      []byte("half"),
		filepath.Join(cfg.Dir, tempPrefix+"imx", "tree/etc"): nil,
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	s = newStore(t, cfg)
	if got, err := s.Get("base"); err != nil || got.ID != img.ID {
		t.Errorf("name after a crash before it was stored: %s, %v; want %s", got.ID, err, img.ID)
	}
	noLeftovers(t, cfg)
	if _, err := os.Lstat(mark); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("mark after opening: %v", err)
	}
	// A removal that got as far as the rename; a damaged image beside it.
	if err := os.Rename(s.imageDir(img.ID), filepath.Join(cfg.Dir, tempPrefix+img.ID)); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(s.imageDir(old.ID), manifestFile), 100); err != nil {
		t.Fatal(err)
	}
	s = newStore(t, cfg)
	if _, err := s.Get("base"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("name of an image that is gone: %v", err)
	}
	if _, err := s.Get(old.ID); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("damaged image: %v, want ErrCorrupt", err)
	}
	if err := s.Remove(t.Context(), old.ID); err != nil {
		t.Errorf("remove a damaged image: %v", err)
	}
	noLeftovers(t, cfg)
}

func TestSpecs(t *testing.T) {
	t.Parallel()
	s := newStore(t, testConfig(t))
	for name, spec := range map[string]BuildSpec{
		"no name":      {},
		"path":         {Name: "../../etc"},
		"id":           {Name: ident.New(ident.Image)},
		"option":       {Name: "a", Packages: []string{"--hook=x"}},
		"removal":      {Name: "a", Packages: []string{"bash-"}},
		"two names":    {Name: "a", Packages: []string{"a,b"}},
		"pattern":      {Name: "a", Packages: []string{"?essential"}},
		"version":      {Name: "a", Packages: []string{"bash=1"}},
		"capitals":     {Name: "a", Packages: []string{"Bash"}},
		"newline":      {Name: "a", Packages: []string{"bash\n"}},
		"small disk":   {Name: "a", DiskMiB: 511},
		"huge disk":    {Name: "a", DiskMiB: 1<<20 + 1},
		"negative":     {Name: "a", DiskMiB: -1},
		"many":         {Name: "a", Packages: make([]string, maxPackages+1)},
		"long package": {Name: "a", Packages: []string{strings.Repeat("a", 200)}},
	} {
		if _, err := s.Build(t.Context(), spec, nil); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	in := []string{"python3", "g++", "bash", "python3"}
	spec, err := BuildSpec{Name: "a", Packages: in}.check()
	if err != nil || strings.Join(spec.Packages, " ") != "bash g++ python3" || spec.DiskMiB != defaultDiskMiB || in[0] != "python3" {
		t.Errorf("check: %+v, %v", spec, err)
	}
}

func TestOneBuildOfANameAtATime(t *testing.T) {
	t.Parallel()
	s := newStore(t, testConfig(t))
	if err := s.reserve(BuildSpec{Name: "a"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Build(t.Context(), BuildSpec{Name: "a", Replace: true}, nil); !errors.Is(err, errdefs.ErrConflict) {
		t.Errorf("second build of a name: %v, want ErrConflict", err)
	}
	if err := s.building.acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Build(ctx, BuildSpec{Name: "b"}, nil); errdefs.Class(err) != errdefs.ErrCanceled {
		t.Errorf("canceled while it waited: %v", err)
	}
	if err := s.reserve(BuildSpec{Name: "b"}); err != nil {
		t.Errorf("name after a canceled build: %v", err)
	}
}

func TestNewChecksConfig(t *testing.T) {
	t.Parallel()
	good := testConfig(t)
	for name, change := range map[string]func(*Config){
		"no agent":           func(c *Config) { c.Agent = nil },
		"no directory":       func(c *Config) { c.CacheDir = "" },
		"relative directory": func(c *Config) { c.Dir = "images" },
	} {
		cfg := good
		change(&cfg)
		if _, err := New(cfg); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
}

func TestRootNeedsItsFiles(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	s := newStore(t, cfg)
	k := fakeKernel(t, cfg)
	img, err := buildFake(t, s, k, "base", treeSource(smallTree))
	if err != nil {
		t.Fatal(err)
	}
	root, err := s.Root(t.Context(), img.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{root.Disk, root.Kernel, root.Initramfs} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v, %v; want a file of mode 0444", path, info, err)
		}
	}
	if err := os.Remove(root.Initramfs); err != nil {
		t.Fatal(err)
	}
	if again, err := s.Root(t.Context(), "base"); err != nil || again != root {
		t.Errorf("Root after the initramfs was lost: %+v, %v", again, err)
	}
	// Modules are read again when an initramfs is made.
	module := filepath.Join(cfg.KernelDir, k.Digest, k.Modules[0].File)
	if err := errors.Join(os.Remove(module), os.WriteFile(module, []byte("other"), 0o444), os.Remove(root.Initramfs)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Root(t.Context(), "base"); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("Root with a damaged module: %v, want ErrCorrupt", err)
	}
	if err := os.RemoveAll(filepath.Join(cfg.KernelDir, k.Digest)); err != nil {
		t.Fatal(err)
	}
	if _, err := newStore(t, cfg).Root(t.Context(), "base"); !errors.Is(err, errdefs.ErrCorrupt) || errdefs.Hint(err) == "" {
		t.Errorf("Root without its kernel: %v, want ErrCorrupt with a hint", err)
	}
}
