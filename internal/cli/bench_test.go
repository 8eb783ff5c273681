package cli

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
)

// numpyAnswer answers right except for the wrong-th eval.
func numpyAnswer(wrong int32) func(context.Context, string, agentwire.EvalRequest) (agentwire.EvalResult, error) {
	var calls atomic.Int32
	return func(context.Context, string, agentwire.EvalRequest) (agentwire.EvalResult, error) {
		if calls.Add(1) == wrong {
			return agentwire.EvalResult{HasResult: true, Result: "'6.6.6'"}, nil
		}
		return agentwire.EvalResult{HasResult: true, Result: "'1.24.2'"}, nil
	}
}

func TestBenchFork(t *testing.T) {
	r := newRig(t)
	r.svc.OnEval = numpyAnswer(0)
	out := filepath.Join(t.TempDir(), "results")
	got := r.run("bench", "fork", "-n", "3", "--runs", "2", "--json", "--out", out)
	var report struct {
		N        int    `json:"n"`
		Answered int    `json:"answered"`
		Command  string `json:"command"`
		Runs     []any  `json:"runs"`
	}
	if err := json.Unmarshal([]byte(got.stdout), &report); err != nil || got.code != 0 || report.N != 3 || report.Answered != 3 || len(report.Runs) != 2 {
		t.Errorf("%v: %+v", err, got)
	}
	if report.Command != "forkd bench fork --count 3 --runs 2" {
		t.Errorf("command %q", report.Command)
	}
	for _, name := range []string{".json", ".md", "-total.png", "-answers.png"} {
		if info, err := os.Stat(filepath.Join(out, "fork-fake-none-n3"+name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	got = r.run("bench", "fork", "--sweep", "1,2", "--out", out)
	if got.code != 0 || !strings.Contains(got.stdout, "| 2 |") {
		t.Errorf("%+v", got)
	}
	if raw, err := os.ReadFile(filepath.Join(out, "fork-fake-none-sweep.json")); err != nil || raw[0] != '[' {
		t.Errorf("%s, %v", raw, err)
	}
	if left := r.svc.Living(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// TestBenchFailures: the exit code tells what went wrong, and no file is written of
// what is no result.
func TestBenchFailures(t *testing.T) {
	r := newRig(t)
	out := filepath.Join(t.TempDir(), "results")
	for _, c := range []struct {
		args  []string
		wrong int32
		code  int
		text  string
	}{
		{[]string{"fork", "-n", "3"}, 3, exitPartial, "2 of 3"},
		{[]string{"rollouts", "-n", "5", "-c", "1"}, 5, exitPartial, "4 of 5"},
		{[]string{"fork", "-n", "3", "--tag", "none"}, 0, exitNotFound, "none"},
		{[]string{"fork", "-n", "0"}, 0, exitUsage, "0 forks"},
		{[]string{"fork", "-n", "3", "--sweep", "1"}, 0, exitUsage, "--sweep"},
		{[]string{"fork", "--pool", "hot"}, 0, exitUsage, "hot"},
		{[]string{"rollouts", "-c", "0"}, 0, exitUsage, "0 rollouts"},
	} {
		r.svc.OnEval = numpyAnswer(c.wrong)
		got := r.run(append(append([]string{"bench"}, c.args...), "--out", out)...)
		if got.code != c.code || !strings.Contains(got.stderr, c.text) {
			t.Errorf("%v: %+v", c.args, got)
		}
		if left := r.svc.Living(); len(left) != 0 {
			t.Errorf("%v left %v", c.args, left)
		}
	}
	if _, err := os.Stat(out); err == nil {
		t.Error("files of failed measurements")
	}
}

func TestBenchCleansUpAfterInterrupt(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	right := numpyAnswer(0)
	var calls atomic.Int32
	r.svc.OnEval = func(ctx context.Context, ref string, q agentwire.EvalRequest) (agentwire.EvalResult, error) {
		if calls.Add(1) > 2 {
			cancel()
			<-ctx.Done()
			return agentwire.EvalResult{}, ctx.Err()
		}
		return right(ctx, ref, q)
	}
	got := r.runContext(ctx, "bench", "fork", "-n", "5")
	if got.code != exitInterrupted || got.stdout != "" || len(r.svc.Living()) != 0 {
		t.Errorf("%+v, left %v", got, r.svc.Living())
	}
}
