package e2e

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// upstreamPackage is the published client that has to work unmodified.
const upstreamPackage = "forkd==0.5.3"

// TestPythonPackage installs the package that upstream published and runs
// testdata/controller.py with it.
func TestPythonPackage(t *testing.T) {
	w := running(t)
	venv := filepath.Join(t.TempDir(), "venv")
	python := filepath.Join(venv, "bin", "python")
	for _, args := range [][]string{
		{"/usr/bin/python3", "-m", "venv", venv},
		{python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir", upstreamPackage},
		{python, "testdata/controller.py"},
	} {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = w.env()
		got := finish(t, cmd)
		if got.code != 0 {
			t.Fatalf("%v: %+v", args, got)
		}
		t.Log(got.stdout)
	}
}
