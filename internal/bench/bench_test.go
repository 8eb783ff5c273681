package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/frontend/rest"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
	"forkd.dev/forkd/internal/sandbox"
	forkd "forkd.dev/forkd/sdk/go"
)

var update = flag.Bool("update", false, "write the golden files")

func numpy(context.Context, string, agentwire.EvalRequest) (agentwire.EvalResult, error) {
	return agentwire.EvalResult{HasResult: true, Result: "'1.24.2'"}, nil
}

// rig is a config whose daemon is the real front end over a fake, in which every
// guest answers right.
func rig(t *testing.T) (Config, *resttest.Service) {
	t.Helper()
	svc := resttest.New()
	svc.OnEval = numpy
	h, err := rest.New(rest.Config{Service: svc, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := forkd.New(forkd.Options{Socket: resttest.ServeUnix(t, h), Getenv: func(string) string { return "" }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return Config{Client: c, Command: "forkd bench", TempDir: t.TempDir(), Proc: t.TempDir()}, svc
}

func options() ForkOptions {
	return ForkOptions{Snapshot: "py-base", Counts: []int{4}, Runs: 3, Pool: PoolNone, Baselines: []string{BaselineProcess, BaselineRunc, BaselineColdBoot}}
}

// stays checks that a measurement left nothing.
func clean(t *testing.T, cfg Config, svc *resttest.Service) {
	t.Helper()
	if left := svc.Living(); len(left) != 0 {
		t.Errorf("sandboxes are left: %v", left)
	}
	list, err := svc.Snapshots(context.Background())
	if svc.Err == nil && (err != nil || len(list) != 1) {
		t.Errorf("snapshots are left: %v, %v", list, err)
	}
	if entries, err := os.ReadDir(cfg.TempDir); err != nil || len(entries) != 0 {
		t.Errorf("files are left: %v, %v", entries, err)
	}
}

func TestFork(t *testing.T) {
	cfg, svc := rig(t)
	o := options()
	o.Counts = []int{1, 4}
	reports, err := Fork(t.Context(), cfg, o)
	if err != nil || len(reports) != 2 {
		t.Fatalf("%v, %v", reports, err)
	}
	r := reports[1]
	if r.N != 4 || r.Answered != 4 || len(r.Runs) != 3 || r.Engine != "fake" || r.PSSKiBPerChild != 24<<10 || r.TotalMS <= 0 ||
		r.P50MS > r.P90MS || r.P90MS > r.P99MS || r.P99MS > r.MaxMS || r.MaxMS > r.TotalMS+0.01 || len(r.children) != 4 {
		t.Errorf("%+v", r)
	}
	if r.CPUSPerFork != nil {
		t.Error("processor time of a daemon that is not on this host")
	}
	// The fake's image is no file, but its builds tell their steps in a way of their own.
	if r.Baselines.Process.Skipped == "" || r.Baselines.Runc.Skipped == "" || r.Baselines.ColdBoot.Skipped == "" || r.Ratios.Process != nil {
		t.Errorf("%+v", r.Baselines)
	}
	clean(t, cfg, svc)
}

// TestWrongAnswersFail: one wrong, missing or failed answer is enough.
func TestWrongAnswersFail(t *testing.T) {
	for name, break1 := range map[string]func(*resttest.Service){
		"wrong": func(svc *resttest.Service) {
			var calls atomic.Int32
			svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
				if calls.Add(1) == 3 { // the first is the look at the snapshot
					return agentwire.EvalResult{HasResult: true, Result: "'6.6.6'"}, nil
				}
				return numpy(ctx, ref, r)
			}
		},
		"raised": func(svc *resttest.Service) {
			var calls atomic.Int32
			svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
				if calls.Add(1) == 3 {
					return agentwire.EvalResult{Error: "ImportError: numpy"}, nil
				}
				return numpy(ctx, ref, r)
			}
		},
		"no guest": func(svc *resttest.Service) {
			var calls atomic.Int32
			svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
				if calls.Add(1) == 3 {
					return agentwire.EvalResult{}, errdefs.New(errdefs.ErrGuest, "silent")
				}
				return numpy(ctx, ref, r)
			}
		},
		"no child": func(svc *resttest.Service) { svc.FailChild = map[int]error{2: errdefs.New(errdefs.ErrGuest, "silent")} },
	} {
		cfg, svc := rig(t)
		break1(svc)
		o := options()
		o.Runs = 1
		reports, err := Fork(t.Context(), cfg, o)
		if !errors.Is(err, ErrAnswers) || len(reports) != 1 || reports[0].Answered != 3 || len(reports[0].Runs[0].Failures) == 0 {
			t.Errorf("%s: %+v, %v", name, reports, err)
		}
		clean(t, cfg, svc)
	}
}

// TestFailuresOfTheDaemonAreItsOwn: what the daemon refuses is no wrong answer.
func TestFailuresOfTheDaemonAreItsOwn(t *testing.T) {
	cfg, svc := rig(t)
	var calls atomic.Int32
	svc.OnFork = func(context.Context, sandbox.Fork) error {
		if calls.Add(1) == 2 {
			return errdefs.New(errdefs.ErrResourceExhausted, "no room")
		}
		return nil
	}
	if _, err := Fork(t.Context(), cfg, options()); !errors.Is(err, errdefs.ErrResourceExhausted) || errors.Is(err, ErrAnswers) {
		t.Errorf("%v", err)
	}
	clean(t, cfg, svc)
	svc.OnFork = nil
	o := options()
	o.Snapshot = "none"
	if _, err := Fork(t.Context(), cfg, o); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("%v", err)
	}
	svc.OnEval = func(context.Context, string, agentwire.EvalRequest) (agentwire.EvalResult, error) {
		return agentwire.EvalResult{Error: "ModuleNotFoundError: No module named 'numpy'"}, nil
	}
	if _, err := Fork(t.Context(), cfg, options()); !errors.Is(err, errdefs.ErrGuest) {
		t.Errorf("a snapshot without numpy: %v", err)
	}
	clean(t, cfg, svc)
}

func TestCancelRemovesEverything(t *testing.T) {
	cfg, svc := rig(t)
	ctx, cancel := context.WithCancel(t.Context())
	var calls atomic.Int32
	svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
		if calls.Add(1) > 1 {
			cancel()
			<-ctx.Done()
			return agentwire.EvalResult{}, ctx.Err()
		}
		return numpy(ctx, ref, r)
	}
	if _, err := Fork(ctx, cfg, options()); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	clean(t, cfg, svc)
}

func TestOtherMemoryIsMadeAndRemoved(t *testing.T) {
	cfg, svc := rig(t)
	o := options()
	o.MemoryMiB = 1024
	reports, err := Fork(t.Context(), cfg, o)
	if err != nil || reports[0].MemoryMiB != 1024 || svc.Changes() == 0 {
		t.Errorf("%+v, %v", reports, err)
	}
	clean(t, cfg, svc)
}

func TestRollouts(t *testing.T) {
	cfg, svc := rig(t)
	r, err := Rollouts(t.Context(), cfg, RolloutOptions{Snapshot: "py-base", Count: 30, Concurrency: 3})
	if err != nil || r.Answered != 30 || r.RolloutsPerS <= 0 || r.P50MS > r.MaxMS || r.AnswerP50MS > r.P50MS || len(r.Leaks.Leaked) != 0 || r.RSSGrowth != nil {
		t.Errorf("%+v, %v", r, err)
	}
	clean(t, cfg, svc)
	var calls atomic.Int32
	svc.OnEval = func(ctx context.Context, ref string, q agentwire.EvalRequest) (agentwire.EvalResult, error) {
		if calls.Add(1)%10 == 0 {
			return agentwire.EvalResult{}, errdefs.New(errdefs.ErrGuest, "silent")
		}
		return numpy(ctx, ref, q)
	}
	r, err = Rollouts(t.Context(), cfg, RolloutOptions{Snapshot: "py-base", Count: 30, Concurrency: 3})
	if !errors.Is(err, ErrAnswers) || r == nil || r.Answered != 27 || len(r.FirstFailures) == 0 {
		t.Errorf("%+v, %v", r, err)
	}
	clean(t, cfg, svc)
}

func TestRolloutVerdict(t *testing.T) {
	grown := ptr(rssTolerance + 1)
	for name, c := range map[string]struct {
		r    RolloutReport
		want error
	}{
		"good":  {RolloutReport{Count: 1, Answered: 1, RSSGrowth: ptr(4.9)}, nil},
		"leak":  {RolloutReport{Count: 1, Answered: 1, Leaks: Leaks{Leaked: []string{"memfds"}}}, ErrLeak},
		"grown": {RolloutReport{Count: 1, Answered: 1, RSSGrowth: grown}, ErrLeak},
		"wrong": {RolloutReport{Count: 2, Answered: 1, RSSGrowth: grown}, ErrAnswers},
	} {
		if err := c.r.verdict(); !errors.Is(err, c.want) || (c.want == nil) != (err == nil) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// fixed is a report with figures that never change.
func fixed() ForkReport {
	runs := []ForkRun{}
	for i := range 3 {
		d := float64(i)
		runs = append(runs, ForkRun{
			Answered: 100, PoolPrepareMS: 30000 + d, TotalMS: 2300 + 100*d, P50MS: 1100 + d, P90MS: 2000 + d, P99MS: 2250 + d, MaxMS: 2300 + d, PSSKiBPerChild: 25600,
			CPUSPerFork: ptr(0.041), PoolPrepareCPUSPerFork: ptr(0.3), ProcessTotalMS: ptr(5500 + d), RuncTotalMS: ptr(6900 + d), processCPU: ptr(0.11), runcCPU: ptr(0.14),
			claimed: map[string]int{"warm": 100}, children: []float64{1, 2, 3},
		})
	}
	s := &subject{engine: "qemu", isolation: "vm-emulated", name: "py-base", memoryMiB: 512}
	r := newForkReport(100, s, ForkOptions{Pool: PoolWarm}, runs)
	r.complete(Baselines{Process: Baseline{How: "a process"}, Runc: Baseline{How: "a container"}, ColdBoot: ColdBoot{MS: ptr(4600), How: "a boot"}}, Machine{
		CPU: "a CPU", Cores: 2, MemoryMiB: 24105, OS: "an OS", Kernel: "6.1", Virtualization: "none", KVM: true, QEMU: "7.2.22", Forkd: "v1", Load1: 0.25, Date: "then",
	}, "forkd bench fork -n 100")
	return r
}

// TestGoldenReport pins the names in JSON, which stay, and the text.
func TestGoldenReport(t *testing.T) {
	raw, err := json.MarshalIndent(fixed(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "fork.json", string(raw)+"\n")
	var text bytes.Buffer
	slow := fixed()
	slow.TotalMS, slow.N, slow.Pool = 11000, 10, PoolNone
	slow.ratios()
	if err := errors.Join(WriteForkMarkdown(&text, []ForkReport{fixed()}), WriteForkMarkdown(&text, []ForkReport{fixed(), slow})); err != nil {
		t.Fatal(err)
	}
	golden(t, "fork.md", text.String())
	rollouts := &RolloutReport{
		Engine: "qemu", Isolation: "vm-emulated", Snapshot: "py-base", MemoryMiB: 512, Count: 2000, Answered: 2000, Concurrency: 4, TotalS: 300, RolloutsPerS: 6.7,
		P50MS: 500, P90MS: 600, P99MS: 700, MaxMS: 900, AnswerP50MS: 450, AnswerP99MS: 650, CPUSPerRoll: ptr(0.2),
		Leaks: newLeaks(map[string]int{countProcesses: 1, countDescriptors: 17, countMemfds: 1, countCgroups: -1, countDirectories: 0},
			map[string]int{countProcesses: 1, countDescriptors: 17, countMemfds: 1, countCgroups: -1, countDirectories: 0}),
		RSS: []RSSSample{{100, 40960}, {200, 41984}, {300, 43008}}, RSSGrowth: ptr(2.4), Claimed: map[string]int{"blank": 1990, "none": 10},
		Machine: fixed().Machine, Command: "forkd bench rollouts",
	}
	if raw, err = json.MarshalIndent(rollouts, "", "  "); err != nil {
		t.Fatal(err)
	}
	golden(t, "rollouts.json", string(raw)+"\n")
	text.Reset()
	if err := WriteRolloutMarkdown(&text, rollouts); err != nil {
		t.Fatal(err)
	}
	golden(t, "rollouts.md", text.String())
}

// TestNamesOfTheContract: the fields that others read, with null where nothing was
// measured rather than left out.
func TestNamesOfTheContract(t *testing.T) {
	raw, err := json.Marshal(newForkReport(1, &subject{}, ForkOptions{}, []ForkRun{{}}))
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(raw, &m); err != nil {
		t.Fatal(err)
	}
	for _, name := range strings.Fields("engine n answered pool pool_prepare_ms total_ms p50_ms p90_ms p99_ms max_ms pss_kib_per_child cpu_s_per_fork baselines machine") {
		if _, ok := m[name]; !ok {
			t.Errorf("%s is not there", name)
		}
	}
	base := regexp.MustCompile(`"baselines":\{"process":\{"total_ms":null.*"runc":\{"total_ms":null.*"cold_boot":\{"ms":null`)
	if !base.Match(raw) {
		t.Errorf("%s", raw)
	}
}

func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != text {
		t.Errorf("%s differs (run with -update to accept):\n--- got ---\n%s--- want ---\n%s", path, text, want)
	}
}
