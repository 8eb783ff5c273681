// Package realguest lets tests of engines use a real guest: Debian with Python and our
// agent. A test of an engine joins what the engine itself may not know: images, the
// agent's client, the conformance suite.
package realguest

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/linux"
)

// DiskMiB is the size of the disk of an image that Root builds.
const DiskMiB = 1024

// Need skips a test that cannot run here, and says what is missing.
func Need(t *testing.T, tools ...string) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs real machines: not with -short")
	}
	if os.Geteuid() != 0 {
		t.Skip("runs real machines: needs root to build an image")
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("runs real machines: %s is not installed", tool)
		}
	}
}

// Harness fills in what concerns the guest and the process of a machine.
func Harness(t *testing.T, open func(t testing.TB) engine.Driver) enginetest.Harness {
	t.Helper()
	return HarnessOf(t, Root(t), open)
}

// HarnessOf is Harness with an image that the caller has.
func HarnessOf(t *testing.T, root engine.Root, open func(t testing.TB) engine.Driver) enginetest.Harness {
	t.Helper()
	st, err := os.Stat(root.Disk)
	if err != nil {
		t.Fatal(err)
	}
	return enginetest.Harness{
		Open: open, Dir: t.TempDir(), Root: root,
		Shape:   engine.Shape{CPUs: 1, MemoryMiB: 256, DiskMiB: int(st.Size() >> 20)},
		Connect: Connect, Start: Start, Crash: Crash,
		Patience: time.Minute, BootPatience: 3 * time.Minute, Silence: time.Second, Fleet: 20,
	}
}

// Connect says hello to the agent.
func Connect(ctx context.Context, conn net.Conn) (enginetest.Guest, error) {
	// A guest that boots in the nested rig reads nothing for as long.
	c, err := guest.Connect(ctx, conn, guest.Options{StallTimeout: 4 * time.Minute})
	if err != nil {
		return nil, err
	}
	return Guest{c}, nil
}

// Start configures a booted guest and warms its Python.
func Start(ctx context.Context, g enginetest.Guest) error {
	c := g.(Guest)
	err := c.Boot(ctx, agentwire.BootConfig{Hostname: "forkd", HostTime: time.Now(), Entropy: make([]byte, 64)})
	if err != nil {
		return err
	}
	_, err = c.WarmStart(ctx, "python", "")
	return err
}

// Crash ends the process of a machine.
func Crash(t testing.TB, m engine.Machine) {
	p, err := linux.Identify(m.PID())
	if err == nil {
		err = p.Kill(9)
	}
	if err != nil {
		t.Errorf("kill the process of %s: %v", m.ID(), err)
	}
}

// ImageEnv names a directory with disk.ext4, vmlinux and initramfs to use instead of
// building an image: what the nested rig has.
const ImageEnv = "FORKD_TEST_IMAGE"

// Root returns a Debian with Python, kept between test runs in FORKD_TEST_CACHE
// or the user's cache directory, with the agent as it is now.
func Root(t *testing.T) engine.Root {
	t.Helper()
	if dir := os.Getenv(ImageEnv); dir != "" {
		return engine.Root{Disk: filepath.Join(dir, "disk.ext4"), Kernel: filepath.Join(dir, "vmlinux"), Initramfs: filepath.Join(dir, "initramfs")}
	}
	return rootOf(t, image.Config{Agent: Agent(t)})
}

// TreeRoot is Root for engines that need the files as a tree, with an agent of theirs.
func TreeRoot(t *testing.T, agent []byte) engine.Root {
	t.Helper()
	return rootOf(t, image.Config{Agent: agent, Trees: true})
}

func rootOf(t *testing.T, cfg image.Config) engine.Root {
	t.Helper()
	cache := os.Getenv("FORKD_TEST_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(user, "forkd-test")
	}
	cfg.Dir, cfg.CacheDir, cfg.KernelDir = filepath.Join(cache, "images"), filepath.Join(cache, "downloads"), filepath.Join(cache, "kernels")
	cfg.InitramfsDir, cfg.Log = filepath.Join(t.TempDir(), "initramfs"), t.Logf
	images, err := image.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	const name = "engine-test"
	img, err := images.Get(name)
	if errors.Is(err, errdefs.ErrNotFound) {
		t.Logf("building image %s into %s", name, cache)
		img, err = images.Build(ctx, image.BuildSpec{Name: name, Packages: []string{"python3"}, DiskMiB: DiskMiB}, func(string, float64) {})
	}
	if err != nil {
		t.Fatal(err)
	}
	root, err := images.Root(ctx, img.ID)
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// Agent builds the agent.
func Agent(t *testing.T) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "forkd-agent")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", path, "forkd.dev/forkd/cmd/forkd-agent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v\n%s", err, out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Guest is a guest that keeps values in the warm Python runner.
type Guest struct{ *guest.Client }

// Ping asks whether the agent answers.
func (g Guest) Ping(ctx context.Context) error {
	_, err := g.Client.Ping(ctx)
	return err
}

// Now asks for the wall clock of the guest.
func (g Guest) Now(ctx context.Context) (time.Time, error) {
	pong, err := g.Client.Ping(ctx)
	return pong.WallClock, err
}

func (g Guest) eval(ctx context.Context, code string) (string, error) {
	res, err := g.Eval(ctx, agentwire.EvalRequest{Code: code, Timeout: time.Minute})
	if err == nil && res.Error != "" {
		err = errdefs.New(errdefs.ErrGuest, "eval %q: %s", code, res.Error)
	}
	return string(res.Stdout), err
}

// Set gives a variable of the runner a value.
func (g Guest) Set(ctx context.Context, name, value string) error {
	_, err := g.eval(ctx, name+" = '"+value+"'")
	return err
}

// Get returns a variable of the runner.
func (g Guest) Get(ctx context.Context, name string) (string, error) {
	return g.eval(ctx, "print("+name+", end='')")
}

func (g Guest) run(ctx context.Context, argv ...string) (string, error) {
	res, err := g.Exec(ctx, agentwire.ExecRequest{Argv: argv, Timeout: time.Minute})
	if err == nil && res.ExitCode != 0 {
		err = errdefs.New(errdefs.ErrGuest, "%q ended with %d: %s", argv, res.ExitCode, res.Stderr)
	}
	return string(res.Stdout), err
}

// WriteFile writes a file of the guest.
func (g Guest) WriteFile(ctx context.Context, path, text string) error {
	_, err := g.run(ctx, "/bin/sh", "-c", `printf %s "$1" > "$2"`, "sh", text, path)
	return err
}

// ReadFile reads a file of the guest.
func (g Guest) ReadFile(ctx context.Context, path string) (string, error) {
	return g.run(ctx, "cat", path)
}
