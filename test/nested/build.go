package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/image/cpio"
	"forkd.dev/forkd/internal/image/kernel"
	"forkd.dev/forkd/test/nested/plan"
	"forkd.dev/forkd/test/realguest"
)

const (
	module     = "forkd.dev/forkd"
	imageName  = "python" // as forkd itself names and makes it
	l1DiskSize = 16 << 30 // sparse
	dataDir    = "/data"  // of forkd in L1, with the image
	imageDir   = "/image" // links to the files of the image, the kernel, and the initramfs
	monitor    = "/bin/forkd-vmm"
)

func (p part) importPath() string { return module + "/" + p.pkg }

// build makes all files of L1.
func (m *machine) build(ctx context.Context, parts []part) error {
	o := m.opts
	if err := buildInitramfs(ctx, o, m.initramfs); err != nil {
		return fmt.Errorf("build the initramfs of L1: %w", err)
	}
	stage := filepath.Join(o.work, "stage")
	if err := os.RemoveAll(stage); err != nil {
		return err
	}
	if err := fill(ctx, stage, o, parts); err != nil {
		return err
	}
	if err := makeDisk(ctx, m.disk, stage); err != nil {
		return fmt.Errorf("make the disk of L1: %w", err)
	}
	return os.RemoveAll(stage)
}

func one(pattern string) (string, error) {
	found, err := filepath.Glob(pattern)
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("%d files match %s, want one", len(found), pattern)
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// buildInitramfs packs init and the modules that L1 needs.
func buildInitramfs(ctx context.Context, o options, path string) error {
	dir, err := one(filepath.Join(o.kernel, "lib/modules/*"))
	if err != nil {
		return err
	}
	if list := filepath.Join(dir, "modules.builtin"); !exists(list) {
		return fmt.Errorf("%s is missing", list)
	}
	modules, err := kernel.Modules(ctx, dir, []kernel.Wish{
		{Name: "virtio_pci"}, {Name: "virtio_blk"}, {Name: "virtio_console"}, {Name: "ext4"}, {Name: "kvm-amd"}, {Name: "tun", Optional: true},
	})
	if err != nil {
		return err
	}
	program := filepath.Join(o.work, "init")
	if err := goBuild(ctx, "build", "-o", program, "./test/nested/init"); err != nil {
		return err
	}
	b, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	var buf bytes.Buffer
	w := cpio.NewWriter(&buf)
	// Every error is kept by the writer and comes from Close.
	_ = w.Dir("dev", 0o755)
	_ = w.CharDevice("dev/console", 0o600, 5, 1)
	_ = w.File("init", 0o755, b)
	_ = w.Dir("modules", 0o755)
	var order strings.Builder
	for _, m := range modules {
		_ = w.File("modules/"+m.Name+".ko", 0o644, m.Data)
		fmt.Fprintln(&order, m.Name)
	}
	_ = w.File("modules/order", 0o644, []byte(order.String()))
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, buf.Bytes(), 0o600)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// goBuild runs the go command; what it builds needs no library of L1.
func goBuild(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// fill lays out the root disk of L1 in the directory stage.
func fill(ctx context.Context, stage string, o options, parts []part) error {
	for dir, perm := range map[string]os.FileMode{"": 0o755, "tmp": 0o777 | os.ModeSticky, "var": 0o755, "var/tmp": 0o777 | os.ModeSticky, "bin": 0o755, "etc": 0o755, "root": 0o700} {
		path := filepath.Join(stage, dir)
		if err := os.MkdirAll(path, perm); err != nil {
			return err
		}
		if err := os.Chmod(path, perm); err != nil { // whatever the umask
			return err
		}
	}
	for name, text := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\n", "etc/group": "root:x:0:\nforkd:x:990:\n", "etc/hosts": "127.0.0.1 localhost\n",
	} {
		if err := os.WriteFile(filepath.Join(stage, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	var commands []plan.Command
	image := false
	for _, p := range parts {
		c, err := p.lay(ctx, stage)
		if err != nil {
			return fmt.Errorf("build part %s: %w", p.name, err)
		}
		commands = append(commands, c)
		image = image || p.image
	}
	if image {
		if err := layPrograms(ctx, stage); err != nil {
			return err
		}
		if err := layImage(ctx, stage); err != nil {
			return fmt.Errorf("build the guest image: %w", err)
		}
	}
	b, err := json.Marshal(commands)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(stage, plan.File), b, 0o644)
}

// env is what all parts find.
func env() []string {
	return []string{
		"HOME=/root", "TMPDIR=/tmp", "FORKD_DATA_DIR=" + dataDir, "FORKD_TEST_NESTED=1", realguest.ImageEnv + "=" + imageDir, "FORKD_TEST_VMM=" + monitor,
	}
}

// lay builds the test and puts it and its testdata on the disk. A part that is a program of ours
// is there already.
func (p part) lay(ctx context.Context, stage string) (plan.Command, error) {
	if len(p.argv) > 0 {
		return plan.Command{Name: p.name, Argv: p.argv, Dir: "/", Timeout: p.timeout, Env: env()}, nil
	}
	binary := "/bin/" + p.name + ".test"
	if err := goBuild(ctx, "test", "-c", "-o", filepath.Join(stage, binary), "./"+p.pkg); err != nil {
		return plan.Command{}, err
	}
	dir := "/src/" + p.pkg
	if err := os.MkdirAll(filepath.Join(stage, dir), 0o755); err != nil {
		return plan.Command{}, err
	}
	if data := filepath.Join(p.pkg, "testdata"); exists(data) {
		if err := os.CopyFS(filepath.Join(stage, dir, "testdata"), os.DirFS(data)); err != nil {
			return plan.Command{}, err
		}
	}
	args := []string{binary, "-test.v=test2json", "-test.count=1", "-test.timeout=" + (p.timeout - 5*time.Second).String()}
	if p.run != "" {
		args = append(args, "-test.run="+p.run)
	}
	return plan.Command{Name: p.name, Argv: args, Dir: dir, Timeout: p.timeout, Env: env()}, nil
}

// layPrograms builds forkd with what it carries, and the monitor.
func layPrograms(ctx context.Context, stage string) error {
	const embedded = "internal/programs/embedded"
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	replace := map[string]string{}
	for _, name := range []string{"forkd-agent", "forkd-vmm"} {
		path := filepath.Join(stage, "bin", name)
		if err := goBuild(ctx, "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", path, "./cmd/"+name); err != nil {
			return err
		}
		replace[filepath.Join(here, embedded, name)] = path
	}
	b, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return err
	}
	overlay := filepath.Join(stage, "tmp/overlay.json")
	if err := os.WriteFile(overlay, b, 0o600); err != nil {
		return err
	}
	return errors.Join(goBuild(ctx, "build", "-trimpath", "-overlay", overlay, "-ldflags", "-s -w", "-o", filepath.Join(stage, "bin/forkd"), "./cmd/forkd"), os.Remove(overlay))
}

// layImage puts the built-in image of forkd into the data directory of L1, and where tests of
// engines look for its files.
func layImage(ctx context.Context, stage string) error {
	cache := os.Getenv("FORKD_TEST_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return err
		}
		cache = filepath.Join(user, "forkd-test")
	}
	agent, err := os.ReadFile(filepath.Join(stage, "bin/forkd-agent"))
	if err != nil {
		return err
	}
	data := filepath.Join(stage, dataDir)
	images, err := image.New(image.Config{
		Dir: filepath.Join(cache, "nested/images"), CacheDir: filepath.Join(cache, "downloads"), KernelDir: filepath.Join(cache, "nested/kernels"),
		InitramfsDir: filepath.Join(data, "initramfs"), Agent: agent, Log: func(string, ...any) {},
	})
	if err != nil {
		return err
	}
	img, err := images.Get(imageName)
	if errors.Is(err, errdefs.ErrNotFound) {
		img, err = images.Build(ctx, image.BuildSpec{Name: imageName, Packages: []string{"python3", "python3-numpy", "python3-pip"}}, func(string, float64) {})
	}
	if err != nil {
		return err
	}
	root, err := images.Root(ctx, img.ID)
	if err != nil {
		return err
	}
	for _, dir := range []string{"images", "kernels"} {
		if err := placeTree(filepath.Join(cache, "nested", dir), filepath.Join(data, dir)); err != nil {
			return err
		}
	}
	dir := filepath.Join(stage, imageDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for from, to := range map[string]string{root.Disk: "disk.ext4", root.Kernel: "vmlinux", root.Initramfs: "initramfs"} {
		if err := placeLink(from, filepath.Join(dir, to), map[string]string{filepath.Join(cache, "nested"): dataDir, stage: ""}); err != nil {
			return err
		}
	}
	return nil
}

// placeLink makes a link to where the file from will be in L1, by the prefixes that move.
func placeLink(from, link string, moved map[string]string) error {
	for was, is := range moved {
		if rest, ok := strings.CutPrefix(from, was+"/"); ok {
			return os.Symlink(filepath.Join("/", is, rest), link)
		}
	}
	return fmt.Errorf("%s is not on the disk of L1", from)
}

// placeTree places all files below from.
func placeTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		if d.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		return place(path, target)
	})
}

// place links from, or copies it where links cannot be.
func place(from, to string) error {
	if os.Link(from, to) == nil {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// makeDisk makes an ext4 file system that holds what is in stage.
func makeDisk(ctx context.Context, path, stage string) error {
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(l1DiskSize), f.Close()); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1", "-m", "0", "-d", stage, path)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("mke2fs: %w\n%s", err, out)
	}
	return nil
}
