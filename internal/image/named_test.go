package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

// upload is an archive of files.
func upload(t *testing.T, files ...string) io.Reader {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for i := 0; i < len(files); i += 2 {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: files[i], Mode: 0o644, Size: int64(len(files[i+1])), Uid: os.Getuid(), Gid: os.Getgid()}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, files[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &buf
}

const fakeELF = "\x7fELF....Linux version 6.9.1-own (me@here) #1"

func TestNamedKernels(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	s := newStore(t, cfg)
	debian := fakeKernel(t, cfg)
	ctx := t.Context()
	k, err := s.AddKernel(ctx, "own", upload(t, "kernel", fakeELF))
	if err != nil {
		t.Fatal(err)
	}
	if k.Kernel.Release != "6.9.1-own" || k.Name != "own" || k.Bytes != int64(len(fakeELF)) {
		t.Errorf("added %+v", k)
	}
	if _, err := s.AddKernel(ctx, "own", upload(t, "kernel", fakeELF)); err != nil {
		t.Errorf("the same again: %v", err)
	}
	if _, err := s.AddKernel(ctx, "own", upload(t, "kernel", fakeELF+"2")); !errors.Is(err, errdefs.ErrConflict) {
		t.Errorf("another of the same name: %v", err)
	}
	if _, err := s.AddKernel(ctx, "alias", upload(t, "kernel", fakeELF)); err != nil {
		t.Error(err)
	}
	s = newStore(t, cfg) // names outlive the daemon
	list, err := s.Kernels(ctx)
	if err != nil || len(list) != 3 || !list[0].Default || list[0].Kernel.Digest != debian.Digest || list[1].Name != "alias" || list[2].Name != "own" {
		t.Fatalf("list %+v, %v", list, err)
	}
	if got, err := s.EnsureKernel(ctx, nil); err != nil || got.Digest != debian.Digest {
		t.Errorf("the default is %s, %v", got.Release, err)
	}
	img, err := buildFake(t, s, k.Kernel, "uses-it", treeSource(smallTree))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveKernel(ctx, "alias"); err != nil {
		t.Errorf("remove one of two names: %v", err)
	}
	if err := s.RemoveKernel(ctx, "own"); !errors.Is(err, errdefs.ErrConflict) || !strings.Contains(err.Error(), img.ID) {
		t.Errorf("remove a kernel in use: %v", err)
	}
	if err := s.Remove(ctx, img.ID); err != nil {
		t.Fatal(err)
	}
	if err := s.RemoveKernel(ctx, "own"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(cfg.KernelDir, k.Kernel.Digest)); err == nil {
		t.Error("its files are left")
	}
	if err := s.RemoveKernel(ctx, "own"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("again: %v", err)
	}
	if _, err := s.Build(ctx, BuildSpec{Name: "x", Kernel: "own"}, nil); !errors.Is(err, errdefs.ErrNotFound) && !errors.Is(err, errdefs.ErrUnsupported) {
		t.Errorf("build with an unknown kernel: %v", err)
	}
}

func TestAddKernelRefuses(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	s := newStore(t, cfg)
	for what, archive := range map[string]io.Reader{
		"no kernel":      upload(t, "vmlinux", fakeELF),
		"not Linux":      upload(t, "kernel", "\x7fELF BSD"),
		"no kernel file": upload(t, "kernel", strings.Repeat("x", 4096)),
		"no archive":     strings.NewReader("x"),
		"bad modules":    upload(t, "kernel", fakeELF, "modules/x.ko", "junk"),
	} {
		if _, err := s.AddKernel(t.Context(), "own", archive); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := s.AddKernel(t.Context(), "../x", upload(t, "kernel", fakeELF)); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("bad name: %v", err)
	}
	entries, err := os.ReadDir(cfg.KernelDir)
	if err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

func TestBuildTar(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("owners and device nodes need root")
	}
	if _, err := findTool("mke2fs"); err != nil {
		t.Skip(err)
	}
	cfg := testConfig(t)
	s := newStore(t, cfg)
	fakeKernel(t, cfg)
	img, err := s.Build(t.Context(), BuildSpec{Name: "tarred", DiskMiB: minDiskMiB, Tar: upload(t, "etc/os-release", "ID=own", "etc/hostname", "theirs")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(img.Source, "tar:sha256:") || img.Suite != "" {
		t.Errorf("image %+v", img)
	}
	disk := filepath.Join(s.imageDir(img.ID), diskFile)
	for name, want := range map[string]string{"/etc/os-release": "ID=own", "/etc/hostname": "forkd\n"} {
		if out, err := run(t.Context(), command{name: "debugfs", args: []string{"-R", "cat " + name, disk}}); err != nil || string(out) != want {
			t.Errorf("%s holds %q, %v", name, out, err)
		}
	}
	if _, err := s.Build(t.Context(), BuildSpec{Name: "bad", DiskMiB: minDiskMiB, Tar: strings.NewReader("no archive")}, nil); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("no archive: %v", err)
	}
	if _, err := s.Get("bad"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a failed build left something: %v", err)
	}
}
