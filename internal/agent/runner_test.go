package agent

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Programs that load runner.py, whose path is their argument, and check a part of it.
var (
	//go:embed testdata/compile_check.py
	compileCheck string
	//go:embed testdata/plan_check.py
	planCheck string
)

// TestCompileLikeTheTree compares what the runner makes of thousands of sources with
// what the syntax tree of the whole says they are: the same values, or the same error.
func TestCompileLikeTheTree(t *testing.T) { runCheck(t, compileCheck) }

// TestPlanReseeds: the short way to reseed changes the keys, all of them, and no more.
func TestPlanReseeds(t *testing.T) { runCheck(t, planCheck) }

func runCheck(t *testing.T, check string) {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here")
	}
	file := filepath.Join(t.TempDir(), "runner.py")
	if err := os.WriteFile(file, []byte(runnerSource), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), python, "-W", "ignore", "-c", check, file).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}
