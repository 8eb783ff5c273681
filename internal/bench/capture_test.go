package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
	"forkd.dev/forkd/internal/sandbox"
)

// guest answers everything that measurements of captures ask, right.
func guest(svc *resttest.Service) {
	var states, moves atomic.Int32
	tree := []string{"0", "0.0", "0.1", "1", "1.0", "1.1"} // in the order of a search
	svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
		answer := func(format string, args ...any) (agentwire.EvalResult, error) {
			return agentwire.EvalResult{HasResult: true, Result: "'" + fmt.Sprintf(format, args...) + "'"}, nil
		}
		switch {
		case strings.HasSuffix(r.Code, "'dirty'"):
			return answer("dirty")
		case strings.HasSuffix(r.Code, "'set'"):
			return answer("set")
		case r.Code == stateRead:
			return answer("hash|files|processes|0.5|%d", states.Add(1))
		case strings.Contains(r.Code, "'changed:'"):
			return answer("changed:other")
		case strings.Contains(r.Code, "bench_path"):
			return answer("path:%s", tree[int(moves.Add(1)-1)%len(tree)])
		}
		return numpy(ctx, ref, r)
	}
	svc.OnExec = func(context.Context, string, agentwire.ExecRequest) (agentwire.ExecResult, error) {
		return agentwire.ExecResult{Stdout: []byte(strings.Repeat("ab", markerBytes) + "\n")}, nil
	}
}

func captureRig(t *testing.T) (Config, *resttest.Service) {
	cfg, svc := rig(t)
	guest(svc)
	return cfg, svc
}

// steady is a counter that always moves.
func steady(int, []byte) (func() (uint64, error), error) {
	var n uint64
	return func() (uint64, error) { n++; return n, nil }, nil
}

func branchOptions() BranchOptions {
	return BranchOptions{Snapshot: "py-base", Mode: "live", Runs: 3, DirtyMiB: []int{1, 100}, Freeze: []bool{true, false}, Children: []int{1, 3}}
}

func TestBranch(t *testing.T) {
	cfg, svc := captureRig(t)
	cfg.counter = steady
	r, err := Branch(t.Context(), cfg, branchOptions())
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, row := range r.Rows {
		rows = append(rows, fmt.Sprintf("%d %t %d", row.DirtyMiB, row.Freeze, row.Children))
		if row.StallMS == nil || row.StallMaxMS == nil || *row.StallMS > *row.StallMaxMS || row.ChildAnswerMS == nil || row.ChildrenStallMS == nil ||
			len(row.Runs) != 3 || row.PauseMS != 3 || row.CopiedMiB != 1 || row.DaemonStallMS != 20 || row.CallMS > row.ReadyMS {
			t.Errorf("%+v", row)
		}
	}
	want := []string{"1 true 1", "1 false 1", "100 true 1", "100 false 1", "10 true 3", "10 false 3"}
	if !slices.Equal(rows, want) || r.StallSkipped != "" {
		t.Errorf("rows %v, skipped %q", rows, r.StallSkipped)
	}
	clean(t, cfg, svc)
}

// TestBranchWithoutSight: the rest is measured where the machine's memory is not to
// be seen, and the report says why stalls are null.
func TestBranchWithoutSight(t *testing.T) {
	cfg, svc := captureRig(t)
	for name, counter := range map[string]func(int, []byte) (func() (uint64, error), error){
		"elsewhere": nil,
		"not allowed": func(int, []byte) (func() (uint64, error), error) {
			return nil, errdefs.New(errdefs.ErrUnavailable, "no")
		},
	} {
		cfg.counter = counter
		r, err := Branch(t.Context(), cfg, branchOptions())
		if err != nil || r.StallSkipped == "" || r.Rows[0].StallMS != nil || r.Rows[0].StallMaxMS != nil || r.Rows[0].ChildAnswerMS == nil {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	clean(t, cfg, svc)
}

func TestBranchFailures(t *testing.T) {
	for name, c := range map[string]struct {
		break1 func(*Config, *resttest.Service, *BranchOptions)
		want   error
	}{
		"silent counter": {func(cfg *Config, svc *resttest.Service, _ *BranchOptions) {
			cfg.counter = steady
			svc.OnExec = func(context.Context, string, agentwire.ExecRequest) (agentwire.ExecResult, error) {
				return agentwire.ExecResult{Stderr: []byte("python3: not found"), ExitCode: 127}, nil
			}
		}, errdefs.ErrGuest},
		"machine gone": {func(cfg *Config, _ *resttest.Service, _ *BranchOptions) {
			cfg.counter = func(int, []byte) (func() (uint64, error), error) {
				return func() (uint64, error) { return 0, errdefs.New(errdefs.ErrNotFound, "no process") }, nil
			}
		}, errdefs.ErrNotFound},
		"wrong child": {func(_ *Config, svc *resttest.Service, _ *BranchOptions) {
			right := svc.OnEval
			var calls atomic.Int32
			svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
				if r.Code == FirstCall && calls.Add(1) > 1 {
					return agentwire.EvalResult{HasResult: true, Result: "'6.6.6'"}, nil
				}
				return right(ctx, ref, r)
			}
		}, ErrAnswers},
		"too dirty": {func(_ *Config, _ *resttest.Service, o *BranchOptions) { o.DirtyMiB = []int{500} }, errdefs.ErrInvalid},
		"mode":      {func(_ *Config, _ *resttest.Service, o *BranchOptions) { o.Mode = "torn" }, errdefs.ErrInvalid},
	} {
		cfg, svc := captureRig(t)
		o := branchOptions()
		c.break1(&cfg, svc, &o)
		if r, err := Branch(t.Context(), cfg, o); !errors.Is(err, c.want) || r != nil {
			t.Errorf("%s: %v, %v", name, r, err)
		}
		clean(t, cfg, svc)
	}
}

func TestRollback(t *testing.T) {
	cfg, svc := captureRig(t)
	o := RollbackOptions{Snapshot: "py-base", Count: 5, Pages: []int{10, 1000}, Checkpoints: 3, DirtyMiB: 10}
	r, err := Rollback(t.Context(), cfg, o)
	if err != nil || len(r.Rows) != 3 || r.Rollbacks[1].DirtyPages != 1000 || !r.Rollbacks[1].Correct || r.Rollbacks[1].Right != 5 ||
		r.Rollbacks[1].P50MS > r.Rollbacks[1].MaxMS || r.Checkpoints.Count != 3 || r.Checkpoints.CallP50MS > r.Checkpoints.ReadyMS {
		t.Errorf("%+v, %v", r, err)
	}
	clean(t, cfg, svc)
}

// TestRollbackFindsWrongStates: what is not as it was at the checkpoint is found.
func TestRollbackFindsWrongStates(t *testing.T) {
	for text, says := range map[string]string{
		"'other|files|processes|0.5|z'": "the memory", "'hash|other|processes|0.5|z'": "the files", "'hash|files|other|0.5|z'": "the processes",
		"'hash|files|processes|0.7|z'": "generator", "'hash|files|processes|0.5|1'": "repeats",
	} {
		cfg, svc := captureRig(t)
		right := svc.OnEval
		var calls atomic.Int32
		svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
			// One at the checkpoint, two that are not measured.
			if r.Code == stateRead && calls.Add(1) == 5 {
				return agentwire.EvalResult{HasResult: true, Result: text}, nil
			}
			return right(ctx, ref, r)
		}
		r, err := Rollback(t.Context(), cfg, RollbackOptions{Snapshot: "py-base", Count: 3, Pages: []int{10}, DirtyMiB: 1})
		if !errors.Is(err, ErrAnswers) || r == nil || r.Rollbacks[0].Correct || r.Rollbacks[0].Right != 2 || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", text, err)
		}
		clean(t, cfg, svc)
	}
	cfg, svc := captureRig(t)
	right := svc.OnEval
	svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
		if strings.Contains(r.Code, "'changed:'") {
			return agentwire.EvalResult{HasResult: true, Result: "'changed:hash'"}, nil
		}
		return right(ctx, ref, r)
	}
	if _, err := Rollback(t.Context(), cfg, RollbackOptions{Snapshot: "py-base", Count: 3, Pages: []int{10}, DirtyMiB: 1}); !errors.Is(err, errdefs.ErrGuest) {
		t.Errorf("nothing was written: %v", err)
	}
	clean(t, cfg, svc)
}

func TestChain(t *testing.T) {
	cfg, svc := captureRig(t)
	r, err := Chain(t.Context(), cfg, ChainOptions{Snapshot: "py-base", Depth: 3, LayerMiB: 20, Count: 4})
	if err != nil || len(r.Rows) != 2 || r.Rows[0].Depth != 1 || r.Rows[1].Depth != 0 || r.Rows[0].Forks != 4 || r.Rows[1].ForkP50MS <= 0 || r.Ratio == nil {
		t.Errorf("%+v, %v", r, err)
	}
	clean(t, cfg, svc)
	if _, err := Chain(t.Context(), cfg, ChainOptions{Snapshot: "py-base", Depth: 30, LayerMiB: 20, Count: 4}); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("more than fits: %v", err)
	}
	clean(t, cfg, svc)
}

func TestSearch(t *testing.T) {
	cfg, svc := captureRig(t)
	o := SearchOptions{Snapshot: "py-base", Branching: 2, Depth: 2, ColdNodes: 1}
	r, err := Search(t.Context(), cfg, o)
	if err != nil || len(r.Rows) != 3 || r.Rows[0].Nodes != 6 || !r.Rows[0].Correct || !r.Rows[1].Correct || *r.Rows[1].NodesPerS <= 0 ||
		r.Rows[2].NodesPerS != nil || r.Rows[2].Skipped == "" {
		t.Errorf("%+v, %v", r, err)
	}
	clean(t, cfg, svc)
	svc.OnEval = func(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
		if strings.Contains(r.Code, "bench_path") {
			return agentwire.EvalResult{HasResult: true, Result: "'path:0'"}, nil
		}
		return numpy(ctx, ref, r)
	}
	r, err = Search(t.Context(), cfg, o)
	if !errors.Is(err, ErrAnswers) || r == nil || r.Rows[0].Correct {
		t.Errorf("wrong states: %+v, %v", r, err)
	}
	clean(t, cfg, svc)
	if n := (SearchOptions{Branching: 3, Depth: 2}).nodes(); n != 12 {
		t.Errorf("%d nodes", n)
	}
}

// TestCaptureCancelRemovesEverything: wherever a measurement is interrupted.
func TestCaptureCancelRemovesEverything(t *testing.T) {
	for name, measure := range map[string]func(context.Context, Config) error{
		"branch": func(ctx context.Context, cfg Config) error { _, err := Branch(ctx, cfg, branchOptions()); return err },
		"rollback": func(ctx context.Context, cfg Config) error {
			_, err := Rollback(ctx, cfg, RollbackOptions{Snapshot: "py-base", Count: 9, Pages: []int{10}, DirtyMiB: 1})
			return err
		},
		"chain": func(ctx context.Context, cfg Config) error {
			_, err := Chain(ctx, cfg, ChainOptions{Snapshot: "py-base", Depth: 3, LayerMiB: 1, Count: 9})
			return err
		},
		"search": func(ctx context.Context, cfg Config) error {
			_, err := Search(ctx, cfg, SearchOptions{Snapshot: "py-base", Branching: 2, Depth: 2})
			return err
		},
	} {
		for _, at := range []int32{2, 4, 6} {
			cfg, svc := captureRig(t)
			cfg.counter = steady
			ctx, cancel := context.WithCancel(t.Context())
			right := svc.OnEval
			var calls atomic.Int32
			svc.OnEval = func(c context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
				if calls.Add(1) >= at {
					cancel()
					<-c.Done()
					return agentwire.EvalResult{}, c.Err()
				}
				return right(c, ref, r)
			}
			if err := measure(ctx, cfg); !errors.Is(err, context.Canceled) {
				t.Errorf("%s at call %d: %v", name, at, err)
			}
			clean(t, cfg, svc)
			cancel()
		}
	}
}

func about(bench string) About {
	s := &subject{engine: "qemu", isolation: "vm-emulated", name: "py-base", memoryMiB: 512, cfg: Config{Command: "forkd bench " + bench}}
	return s.about(bench, fixed().Machine)
}

// TestGoldenCaptureReports pins the names in JSON, which stay, and the text.
func TestGoldenCaptureReports(t *testing.T) {
	row := BranchRow{Mode: "live", Freeze: true, DirtyMiB: 10, Children: 1}
	for i := range 3 {
		d := float64(i)
		row.Runs = append(row.Runs, BranchRun{
			CopiedMiB: 22 + d, PauseMS: 12 + d, CallMS: 40 + d, ReadyMS: 300 + d, LongestMS: ptr(32 + d), IdleMS: ptr(2), StallMS: ptr(30 + d), StallCallMS: ptr(29 + d),
			SourceForkMS: ptr(9), ChildAnswerMS: ptr(170 + d), LayerBytes: 11 << 20, daemonStallMS: 35,
		})
	}
	row.complete()
	blind := BranchRow{Mode: "live", DirtyMiB: 1, Runs: []BranchRun{{CallMS: 20}}}
	blind.complete()
	rollback := RollbackRow{Kind: "rollback", DirtyPages: 1000, P50MS: 150, MaxMS: 210, Correct: true, Count: 200, Right: 200, CallP50MS: 120, times: []float64{1, 2}}
	checkpoint := CheckpointRow{Kind: "checkpoint", CallP50MS: 45, DirtyMiB: 10, ReadyMS: 280, PauseMS: 11, Count: 10}
	counts := map[string]int{countProcesses: 2, countDescriptors: 20, countMemfds: 4, countCgroups: -1, countDirectories: 1}
	reports := struct {
		Branch   *BranchReport   `json:"branch"`
		Rollback *RollbackReport `json:"rollback"`
		Chain    *ChainReport    `json:"chain"`
		Search   *SearchReport   `json:"search"`
	}{
		&BranchReport{About: about("branch"), Rows: []BranchRow{row, blind}},
		&RollbackReport{About: about("rollback"), Rows: []any{rollback, checkpoint}, Rollbacks: []RollbackRow{rollback}, Checkpoints: checkpoint, Leaks: newLeaks(counts, counts)},
		&ChainReport{About: about("chain"), Layers: 10, LayerMiB: 20, Ratio: ptr(1.02), Rows: []ChainRow{
			{Depth: 11, ForkP50MS: 168, LayerBytes: 210 << 20, ResidentMS: 60, FirstMS: 228, Forks: 20}, {ForkP50MS: 165, LayerBytes: 290 << 20, FirstMS: 165, Forks: 20},
		}},
		&SearchReport{About: about("search"), Branching: 3, Depth: 2, Rows: []SearchRow{
			{By: SearchRollback, Nodes: 12, TotalS: ptr(3), NodesPerS: ptr(4), Correct: true}, {By: SearchColdStart, Nodes: 1, Skipped: "no image"},
		}},
	}
	raw, err := json.MarshalIndent(reports, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "captures.json", string(raw)+"\n")
	var text bytes.Buffer
	err = errors.Join(WriteBranchMarkdown(&text, reports.Branch), WriteRollbackMarkdown(&text, reports.Rollback),
		WriteChainMarkdown(&text, reports.Chain), WriteSearchMarkdown(&text, reports.Search))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "captures.md", text.String())
	for name, draw := range map[string]func() (map[string][]byte, error){
		"rollback": func() (map[string][]byte, error) { return RollbackCharts(reports.Rollback) },
		"chain":    func() (map[string][]byte, error) { return ChainCharts(reports.Chain) },
		"search":   func() (map[string][]byte, error) { return SearchCharts(reports.Search) },
		"branch":   func() (map[string][]byte, error) { return BranchCharts(&BranchReport{Rows: []BranchRow{row, row}}) },
	} {
		if charts, err := draw(); err != nil || len(charts) != 1 {
			t.Errorf("charts of %s: %d, %v", name, len(charts), err)
		}
	}
}

// TestNamesOfTheCaptureContract: the fields that others read, also where nothing was
// measured.
func TestNamesOfTheCaptureContract(t *testing.T) {
	for names, row := range map[string]any{
		"mode freeze dirty_mib copied_mib pause_ms stall_ms stall_max_ms call_ms layer_bytes child_answer_ms children": BranchRow{},
		"dirty_pages rollback_ms_p50 rollback_ms_max correct":                                                          RollbackRow{},
		"call_ms_p50": CheckpointRow{},
		"depth fork_p50_ms layer_bytes resident_ms": ChainRow{},
	} {
		raw, err := json.Marshal(row)
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]any
		if err := json.Unmarshal(raw, &m); err != nil {
			t.Fatal(err)
		}
		for _, name := range strings.Fields(names) {
			if _, ok := m[name]; !ok {
				t.Errorf("%T: %s is not there", row, name)
			}
		}
	}
}

func TestReadyEndsWithWhatFailed(t *testing.T) {
	cfg, svc := captureRig(t)
	sn, err := svc.Snapshots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &subject{cfg: cfg}
	if _, err := s.ready(t.Context(), "none"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("no snapshot: %v", err)
	}
	if got, err := s.ready(t.Context(), sn[0].ID); err != nil || got.Status != string(sandbox.SnapshotReady) {
		t.Errorf("%+v, %v", got, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	<-ctx.Done()
	if _, err := s.ready(ctx, sn[0].ID); err == nil {
		t.Error("a call without time succeeds")
	}
}
