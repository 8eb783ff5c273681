package gvisor

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
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/image"
	"forkd.dev/forkd/internal/linux"
)

// TestConformance runs the suite on real sandboxes: runsc, a Debian, our agent.
func TestConformance(t *testing.T) {
	needSandboxes(t)
	runsc, version := needRunsc(t)
	agent := buildAgent(t)
	root := testRoot(t, agent)
	t.Logf("runsc %s", version)
	dir := t.TempDir()
	driverDir := filepath.Join(dir, "driver")
	if err := os.Mkdir(driverDir, 0o711); err != nil {
		t.Fatal(err)
	}
	installation := ident.New(ident.Sandbox)[2:] // another run on this host is another one
	enginetest.Run(t, enginetest.Harness{
		Open: func(t testing.TB) engine.Driver {
			d, err := New(Config{Dir: driverDir, Installation: installation, Runsc: runsc, Agent: agent, Log: t.Logf})
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Dir:   dir,
		Root:  root,
		Shape: engine.Shape{CPUs: 1, MemoryMiB: 256, DiskMiB: testDiskMiB},
		Connect: func(ctx context.Context, conn net.Conn) (enginetest.Guest, error) {
			c, err := guest.Connect(ctx, conn, guest.Options{})
			if err != nil {
				return nil, err
			}
			return pythonGuest{c}, nil
		},
		Start: func(ctx context.Context, g enginetest.Guest) error {
			c := g.(pythonGuest)
			err := c.Boot(ctx, agentwire.BootConfig{Hostname: "forkd", HostTime: time.Now(), Entropy: make([]byte, 64)})
			if err != nil {
				return err
			}
			_, err = c.WarmStart(ctx, "python", "")
			return err
		},
		Crash: func(t testing.TB, m engine.Machine) {
			p, err := linux.Identify(m.PID())
			if err == nil {
				err = p.Kill(9)
			}
			if err != nil {
				t.Errorf("kill the process of %s: %v", m.ID(), err)
			}
		},
		Inspect:  inspectSandbox,
		Patience: time.Minute, Silence: time.Second, Fleet: 20,
	})
}

// needSandboxes skips a test that cannot run here, and says what is missing.
func needSandboxes(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs real sandboxes: not with -short")
	}
	if os.Geteuid() != 0 {
		t.Skip("runs real sandboxes: needs root to build an image")
	}
	for _, tool := range []string{"mmdebstrap", "mkfs.erofs"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("runs real sandboxes: %s is not installed", tool)
		}
	}
}

// needRunsc returns the runsc to test: that of FORKD_TEST_RUNSC, or the one in PATH.
func needRunsc(t *testing.T) (path, version string) {
	t.Helper()
	if path = os.Getenv("FORKD_TEST_RUNSC"); path != "" {
		version, err := checkRunsc(path)
		if err != nil {
			t.Fatal(err)
		}
		return path, version
	}
	path, version, err := FindRunsc(t.TempDir())
	if err != nil {
		t.Skipf("runs real sandboxes: %v", err)
	}
	return path, version
}

const testDiskMiB = 1024

// testRoot returns a Debian with Python, kept between test runs in FORKD_TEST_CACHE
// or the user's cache directory, with the agent as it is now.
func testRoot(t *testing.T, agent []byte) engine.Root {
	t.Helper()
	cache := os.Getenv("FORKD_TEST_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		cache = filepath.Join(user, "forkd-test")
	}
	images, err := image.New(image.Config{
		Dir: filepath.Join(cache, "images"), CacheDir: filepath.Join(cache, "downloads"), KernelDir: filepath.Join(cache, "kernels"),
		InitramfsDir: filepath.Join(t.TempDir(), "initramfs"), Agent: agent, Trees: true, Log: t.Logf,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	const name = "engine-test"
	img, err := images.Get(name)
	if errors.Is(err, errdefs.ErrNotFound) {
		t.Logf("building image %s into %s", name, cache)
		img, err = images.Build(ctx, image.BuildSpec{Name: name, Packages: []string{"python3"}, DiskMiB: testDiskMiB}, func(string, float64) {})
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

func buildAgent(t *testing.T) []byte {
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

// pythonGuest keeps values in the warm Python runner.
type pythonGuest struct{ *guest.Client }

func (g pythonGuest) Ping(ctx context.Context) error {
	_, err := g.Client.Ping(ctx)
	return err
}

func (g pythonGuest) Now(ctx context.Context) (time.Time, error) {
	pong, err := g.Client.Ping(ctx)
	return pong.WallClock, err
}

func (g pythonGuest) eval(ctx context.Context, code string) (string, error) {
	res, err := g.Eval(ctx, agentwire.EvalRequest{Code: code, Timeout: time.Minute})
	if err == nil && res.Error != "" {
		err = errdefs.New(errdefs.ErrGuest, "eval %q: %s", code, res.Error)
	}
	return string(res.Stdout), err
}

func (g pythonGuest) Set(ctx context.Context, name, value string) error {
	_, err := g.eval(ctx, name+" = '"+value+"'")
	return err
}

func (g pythonGuest) Get(ctx context.Context, name string) (string, error) {
	return g.eval(ctx, "print("+name+", end='')")
}

func (g pythonGuest) run(ctx context.Context, argv ...string) (string, error) {
	res, err := g.Exec(ctx, agentwire.ExecRequest{Argv: argv, Timeout: time.Minute})
	if err == nil && res.ExitCode != 0 {
		err = errdefs.New(errdefs.ErrGuest, "%q ended with %d: %s", argv, res.ExitCode, res.Stderr)
	}
	return string(res.Stdout), err
}

func (g pythonGuest) WriteFile(ctx context.Context, path, text string) error {
	_, err := g.run(ctx, "/bin/sh", "-c", `printf %s "$1" > "$2"`, "sh", text, path)
	return err
}

func (g pythonGuest) ReadFile(ctx context.Context, path string) (string, error) {
	return g.run(ctx, "cat", path)
}
