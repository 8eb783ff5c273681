package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
)

// stable replaces what differs from run to run: times and versions of Go.
func stable(text string) string {
	text = regexp.MustCompile(`\d+\.\d+ m?s\b`).ReplaceAllString(text, "TIME")
	text = regexp.MustCompile(`go1\.[0-9a-z.-]+( X:\S+)?, \w+/\w+`).ReplaceAllString(text, "GO")
	text = regexp.MustCompile(`(TIME)  +`).ReplaceAllString(text, "TIME  ")
	return text
}

// proofAnswer answers the proof of one fork, and counts; same repeats a value in all forks.
func proofAnswer(rig *rig, same string) func(context.Context, string, agentwire.EvalRequest) (agentwire.EvalResult, error) {
	return func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
		if strings.Contains(r.Code, "_forkd_count") {
			sb, err := rig.svc.Sandbox(ctx, ref)
			raw, _ := json.Marshal(demoChild{Hint: sb.Labels["hint"], Count: 41})
			return agentwire.EvalResult{Stdout: raw}, err
		}
		if r.Code != proofCode {
			return agentwire.EvalResult{HasResult: true, Result: "'1.24.2'"}, nil
		}
		values := map[string]string{}
		for _, name := range proofNames {
			values[name] = fmt.Sprintf("%s of %s", name, ref)
			if name == same {
				values[name] = "the same"
			}
		}
		raw, err := json.Marshal(values)
		return agentwire.EvalResult{Stdout: raw}, err
	}
}

func TestDemo(t *testing.T) {
	r := newRig(t)
	r.svc.OnEval = proofAnswer(r, "")
	got := r.run("demo", "-n", "3")
	golden(t, "demo", stable(transcript([]string{"demo", "-n", "3"}, got)))
	if left := r.svc.Living(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	got = r.run("demo", "-n", "2", "--json")
	var report demoReport
	if err := json.Unmarshal([]byte(got.stdout), &report); err != nil || len(report.Forks) != 2 || len(report.Unique) != len(proofNames) || len(report.Steps) != 7 || len(report.Story.Children) != len(demoHints) {
		t.Errorf("JSON: %v, %+v", err, got)
	}
}

// TestDemoFindsWhatIsShared: a value that two forks share is a failure.
func TestDemoFindsWhatIsShared(t *testing.T) {
	for _, name := range proofNames {
		r := newRig(t)
		r.svc.OnEval = proofAnswer(r, name)
		got := r.run("demo", "-n", "2")
		if got.code != 1 || !strings.Contains(got.stderr, name+": only 1 different values in 2 forks") || !strings.Contains(got.stdout, "NOT UNIQUE") {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestProveNeedsEveryValue(t *testing.T) {
	whole := map[string]string{}
	for _, name := range proofNames {
		whole[name] = "a"
	}
	for _, p := range prove([]demoFork{{Values: whole}, {Values: map[string]string{}}}) {
		if p.OK {
			t.Errorf("%s is proved although a fork lacks it", p.Name)
		}
	}
	delete(whole, "numpy.random.rand")
	for _, p := range prove([]demoFork{{Values: whole}}) {
		if p.Name == "numpy.random.rand" || !p.OK {
			t.Errorf("one fork without numpy: %+v", p)
		}
	}
}

func TestDemoCleansUpAfterInterrupt(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	r.svc.OnEval = func(ctx context.Context, _ string, _ agentwire.EvalRequest) (agentwire.EvalResult, error) {
		cancel()
		<-ctx.Done()
		return agentwire.EvalResult{}, ctx.Err()
	}
	got := r.runContext(ctx, "demo", "-n", "5")
	if got.code != 130 || got.stdout != "" || len(r.svc.Living()) != 0 {
		t.Errorf("%+v, left %v", got, r.svc.Living())
	}
}
