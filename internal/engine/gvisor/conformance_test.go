package gvisor

import (
	"os"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/enginetest"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/test/realguest"
)

// TestConformance runs the suite on real sandboxes: runsc, a Debian, our agent.
func TestConformance(t *testing.T) {
	realguest.Need(t, "mmdebstrap", "mkfs.erofs")
	runsc, version := needRunsc(t)
	agent := realguest.Agent(t)
	t.Logf("runsc %s", version)
	dir := filepath.Join(t.TempDir(), "driver")
	if err := os.Mkdir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	installation := ident.New(ident.Sandbox)[2:] // another run on this host is another one
	h := realguest.HarnessOf(t, realguest.TreeRoot(t, agent), func(t testing.TB) engine.Driver {
		d, err := New(Config{Dir: dir, Installation: installation, Runsc: runsc, Agent: agent, Log: t.Logf})
		if err != nil {
			t.Fatal(err)
		}
		return d
	})
	h.Inspect = inspectSandbox
	enginetest.Run(t, h)
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
