package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

// testConfig is a Config below a directory of the test.
func testConfig(t *testing.T) Config {
	t.Helper()
	dir := t.TempDir()
	return Config{
		Dir: filepath.Join(dir, "images"), CacheDir: filepath.Join(dir, "cache"),
		KernelDir: filepath.Join(dir, "kernels"), InitramfsDir: filepath.Join(dir, "initramfs"),
		Agent: []byte("#!/agent"), Log: t.Logf,
	}
}

func newStore(t *testing.T, cfg Config) *Store {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func needRealBuild(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("builds a real image: not with -short")
	}
	if os.Geteuid() != 0 {
		t.Skip("builds a real image: needs root")
	}
}

// debugfs runs one command of debugfs on a disk.
func debugfs(t *testing.T, disk, request string) string {
	t.Helper()
	path, err := findTool("debugfs")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(path, "-R", request, disk).Output()
	if err != nil {
		t.Fatalf("debugfs %s: %v", request, err)
	}
	return string(out)
}

// wantStat checks that debugfs' stat of file contains each part.
func wantStat(t *testing.T, disk, file string, parts ...string) {
	t.Helper()
	out := strings.Join(strings.Fields(debugfs(t, disk, "stat "+file)), " ")
	for _, p := range parts {
		if !strings.Contains(out, p) {
			t.Errorf("%s: no %q in: %s", file, p, out)
		}
	}
}

func fsck(t *testing.T, disk string) {
	t.Helper()
	path, err := findTool("e2fsck")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(path, "-f", "-n", disk).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v: %s", err, out)
	}
}

func TestRealBuild(t *testing.T) {
	needRealBuild(t)
	cfg := testConfig(t)
	s := newStore(t, cfg)
	last := -1.0
	progress := func(step string, fraction float64) {
		t.Logf("%3.0f%% %s", fraction*100, step)
		if fraction < last || fraction > 1 {
			t.Errorf("progress goes from %v to %v", last, fraction)
		}
		last = fraction
	}
	img, err := s.Build(t.Context(), BuildSpec{Name: "small", Packages: []string{"iputils-ping"}, DiskMiB: 1024}, progress)
	if err != nil {
		t.Fatal(err)
	}
	root, err := s.Root(t.Context(), img.ID)
	if err != nil {
		t.Fatal(err)
	}
	checkRealDisk(t, root.Disk, img)
	checkRealKernel(t, s, root.Kernel, root.Initramfs)

	// A second store on the same directories finds all of it, a new agent only
	// makes a new initramfs.
	cfg.Agent = []byte("#!/agent 2")
	again, err := newStore(t, cfg).Root(t.Context(), "small")
	if err != nil || again.Disk != root.Disk || again.Kernel != root.Kernel || again.Initramfs == root.Initramfs {
		t.Errorf("after opening again: %+v, %v; was %+v", again, err, root)
	}
	testUnknownPackage(t, s)
	noLeftovers(t, cfg)
}

func checkRealDisk(t *testing.T, disk string, img Image) {
	t.Helper()
	info, err := os.Stat(disk)
	if err != nil || info.Size() != 1024<<20 || info.Mode().Perm() != 0o444 {
		t.Fatalf("disk: %v, %v", info, err)
	}
	if img.Bytes <= 0 || img.Bytes > 400<<20 {
		t.Errorf("disk has %d physical bytes, want a sparse one", img.Bytes)
	}
	if digest, err := DigestDisk(t.Context(), disk); err != nil || digest != img.Digest {
		t.Errorf("digest %s, %v; manifest has %s", digest, err, img.Digest)
	}
	fsck(t, disk)
	wantStat(t, disk, "/", "Mode: 0755", "User: 0 Group: 0")
	wantStat(t, disk, "/usr/bin/passwd", "Mode: 04755", "User: 0 Group: 0")
	wantStat(t, disk, "/usr/bin/chage", "Mode: 02755", "Group: 42")
	wantStat(t, disk, "/var/mail", "Mode: 02775", "Group: 8")
	wantStat(t, disk, "/tmp", "Mode: 01777")
	wantStat(t, disk, "/dev/null", "Type: character special", "Mode: 0666", "Device major/minor number: 01:03")
	wantStat(t, disk, "/usr/bin/ping", "security.capability")
	for file, want := range map[string]string{
		"/etc/hostname": "forkd\n", "/etc/machine-id": "", "/etc/resolv.conf": "",
		"/etc/apt/sources.list": strings.Join(defaultMirrors().lines(debianSuite, debianKeyring), "\n") + "\n",
	} {
		if got := debugfs(t, disk, "cat "+file); got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
	for _, dir := range []string{"/var/lib/apt/lists", "/var/cache/apt/archives", "/tmp", "/run"} {
		for _, name := range strings.Fields(debugfs(t, disk, "ls -p "+dir)) {
			if parts := strings.Split(name, "/"); len(parts) > 5 && !slices.Contains([]string{".", "..", "partial", "lock"}, parts[5]) {
				t.Errorf("%s holds %s", dir, parts[5])
			}
		}
	}
}

func checkRealKernel(t *testing.T, s *Store, vmlinux, initramfs string) {
	t.Helper()
	k, err := s.EnsureKernel(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("kernel %s from %s %s", k.Release, k.Package, k.Version)
	var order []string
	for i, m := range k.Modules {
		if prefix := fmt.Sprintf("modules/%02d-", i); !strings.HasPrefix(m.File, prefix) {
			t.Errorf("module %d is %s", i, m.File)
		}
		order = append(order, m.File[len("modules/00-"):])
	}
	t.Logf("modules: %s", strings.Join(order, " "))
	for _, pair := range [][2]string{{"virtio_ring", "virtio"}, {"virtio", "virtio_mmio"}, {"virtio", "virtio_blk"}, {"virtio", "virtio_console"}, {"virtio", "virtio-rng"}} {
		first, then := slices.Index(order, pair[0]+".ko"), slices.Index(order, pair[1]+".ko")
		if first < 0 || then < first {
			t.Errorf("%s does not come before %s in %v", pair[0], pair[1], order)
		}
	}
	head := make([]byte, 4)
	if f, err := os.Open(vmlinux); err != nil {
		t.Error(err)
	} else if _, err := f.Read(head); err != nil || string(head) != "\x7fELF" || f.Close() != nil {
		t.Errorf("vmlinux starts with %x, %v", head, err)
	}
	data, err := os.ReadFile(initramfs)
	if err != nil || !strings.HasPrefix(string(data), "070701") || !strings.Contains(string(data), "modules/00-virtio_ring.ko") {
		t.Errorf("initramfs of %d bytes, %v", len(data), err)
	}
}

func testUnknownPackage(t *testing.T, s *Store) {
	t.Helper()
	_, err := s.Build(t.Context(), BuildSpec{Name: "broken", Packages: []string{"no-such-package-here"}}, nil)
	if !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), `package "no-such-package-here" is not in Debian`) {
		t.Errorf("unknown package: %v, want ErrInvalid naming it", err)
	}
	t.Logf("unknown package: %v", err)
}

// TestCanceledBuildLeavesNothing cancels while packages are installed.
func TestCanceledBuildLeavesNothing(t *testing.T) {
	needRealBuild(t)
	cfg := testConfig(t)
	s := newStore(t, cfg)
	fakeKernel(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := s.Build(ctx, BuildSpec{Name: "late"}, func(step string, _ float64) {
		if step == "installing the base system" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || errdefs.Class(err) != errdefs.ErrCanceled {
		t.Fatalf("canceled build: %v", err)
	}
	noLeftovers(t, cfg)
	if list, err := s.List(); err != nil || len(list) != 0 {
		t.Errorf("images after a canceled build: %v, %v", list, err)
	}
}

// noLeftovers checks that nothing half-made, mounted or running refers to cfg.
func noLeftovers(t *testing.T, cfg Config) {
	t.Helper()
	for _, dir := range []string{cfg.Dir, cfg.CacheDir, cfg.KernelDir, cfg.InitramfsDir} {
		found, err := filepath.Glob(filepath.Join(dir, tempPrefix+"*"))
		if err != nil || len(found) != 0 {
			t.Errorf("leftovers %v, %v", found, err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), cfg.Dir) {
		t.Errorf("mounts below %s are left, %v", cfg.Dir, err)
	}
	cmdlines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cmdlines {
		if b, err := os.ReadFile(c); err == nil && strings.Contains(string(b), cfg.Dir) {
			t.Errorf("process is left: %s %q", c, b)
		}
	}
}
