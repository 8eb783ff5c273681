package kvm

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/test/realguest"
)

// TestConformance runs the suite on real machines: our monitor, Debian's kernel, our agent. It needs
// a /dev/kvm that runs kernel code; test/nested makes one.
func TestConformance(t *testing.T) {
	needMachines(t)
	h := realguest.Harness(t, newDrivers(t, 2))
	if os.Getenv(nestedEnv) != "" {
		h.Patience, h.BootPatience, h.Silence, h.Fleet = 2*time.Minute, 4*time.Minute, 3*time.Second, 10
	}
	h.Inspect = inspectProcess
	enginetest.Run(t, h)
}

// nestedEnv is set in the nested rig, where all is slow.
const nestedEnv = "FORKD_TEST_NESTED"

func needMachines(t *testing.T) {
	t.Helper()
	realguest.Need(t)
	speed, err := measure(t.Context())
	if err != nil {
		t.Skipf("runs real machines: %v (make test-kvm runs this in an emulated host)", err)
	}
	if speed.MIPS() < minMIPS {
		t.Skipf("runs real machines: %v (make test-kvm runs this in an emulated host)", speed)
	}
}

// newDrivers returns a function that opens drivers of one installation.
func newDrivers(t *testing.T, blank int) func(t testing.TB) engine.Driver {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "driver")
	if err := os.Mkdir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	program := monitor(t)
	installation := ident.New(ident.Sandbox)[2:] // another run on this host is another one
	return func(t testing.TB) engine.Driver {
		d, err := New(context.Background(), Config{
			Dir: dir, LibexecDir: filepath.Join(dir, "libexec"), Program: program, Installation: installation, Blank: blank, Log: t.Logf,
		})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
}

// MonitorEnv names a forkd-vmm to use instead of building it: what the nested rig has.
const monitorEnv = "FORKD_TEST_VMM"

// monitor returns forkd-vmm as it is now.
func monitor(t *testing.T) []byte {
	t.Helper()
	path := os.Getenv(monitorEnv)
	if path == "" {
		path = filepath.Join(t.TempDir(), "forkd-vmm")
		cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", path, "forkd.dev/forkd/cmd/forkd-vmm")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build the monitor: %v\n%s", err, out)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
