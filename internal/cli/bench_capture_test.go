package cli

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
)

// capturedGuest answers what bench branch and bench chain ask.
func capturedGuest(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
	if strings.HasSuffix(r.Code, "'dirty'") {
		return agentwire.EvalResult{HasResult: true, Result: "'dirty'"}, nil
	}
	return numpyAnswer(0)(ctx, ref, r)
}

func TestBenchCaptures(t *testing.T) {
	r := newRig(t)
	r.svc.OnEval = capturedGuest
	out := filepath.Join(t.TempDir(), "results")
	for _, c := range []struct {
		args    []string
		name    string
		command string
		rows    int
	}{
		{[]string{"branch", "--runs", "2", "--dirty", "1,10", "--freeze", "true", "--children", "1"}, "branch-fake-live-512MiB",
			"forkd bench branch --runs 2 --dirty 1,10 --children 1 --freeze true", 2},
		{[]string{"chain", "--depth", "2", "-n", "2"}, "chain-fake-2", "forkd bench chain --count 2 --depth 2", 2},
	} {
		got := r.run(append(append([]string{"bench"}, c.args...), "--json", "--out", out)...)
		var report struct {
			Command string `json:"command"`
			Rows    []any  `json:"rows"`
		}
		if err := json.Unmarshal([]byte(got.stdout), &report); err != nil || got.code != 0 || len(report.Rows) != c.rows || report.Command != c.command {
			t.Errorf("%v: %v: %+v", c.args, err, got)
		}
		for _, suffix := range []string{".json", ".md"} {
			if info, err := os.Stat(filepath.Join(out, c.name+suffix)); err != nil || info.Size() == 0 {
				t.Errorf("%v: %v", c.args, err)
			}
		}
	}
	if left := r.svc.Living(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestBenchCaptureFailures(t *testing.T) {
	r := newRig(t)
	r.svc.OnEval = capturedGuest
	for _, c := range []struct {
		args string
		code int
		text string
	}{
		{"branch --mode torn", exitUsage, "torn"},
		{"branch --freeze perhaps", exitUsage, "perhaps"},
		{"branch --dirty 0", exitUsage, "0 MiB"},
		{"branch --dirty 400", exitUsage, "--memory"},
		{"branch --tag none", exitNotFound, "none"},
		{"rollback -n 0", exitUsage, "0 rollbacks"},
		{"rollback --pages 0", exitUsage, "0 pages"},
		{"rollback -n 1", 1, "'1.24.2'"}, // a guest that answers something else
		{"chain --depth 0", exitUsage, "0 layers"},
		{"search --branching 0", exitUsage, "0 moves"},
		{"search --depth 1 --cold 0", exitPartial, "node"},
	} {
		got := r.run(append([]string{"bench"}, strings.Fields(c.args)...)...)
		if got.code != c.code || !strings.Contains(got.stderr, c.text) {
			t.Errorf("%s: %+v", c.args, got)
		}
		if left := r.svc.Living(); len(left) != 0 {
			t.Errorf("%s left %v", c.args, left)
		}
	}
}
