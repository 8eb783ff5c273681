package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// said is what the script prints in a guest that is factor times slower than 1 ms each.
func said(factor float64, answer any) string {
	r := guestRun{MS: Times{}, Check: map[string]any{"cpu_fib": answer}, FilesOn: "tmpfs", Python: "3.11.2", Numpy: "1.24.2"}
	for i, w := range GuestWorks() {
		r.MS[w.Name] = factor * float64(i+1)
		r.TotalMS += 2 * r.MS[w.Name]
	}
	raw, _ := json.Marshal(r) // plain data
	return string(raw) + "\n"
}

// guestRig has two engines whose daemons are fakes.
func guestRig(t *testing.T, exec func(engine string, call int) (agentwire.ExecResult, error)) (Config, []GuestEngine, *atomic.Int32) {
	t.Helper()
	var stops atomic.Int32
	var base Config
	var engines []GuestEngine
	for _, name := range []string{"one", "two"} {
		cfg, svc := rig(t)
		var calls atomic.Int32
		svc.OnExec = func(_ context.Context, _ string, q agentwire.ExecRequest) (agentwire.ExecResult, error) {
			if q.Argv[0] != "/usr/bin/python3" || q.Argv[2] != guestScript || q.Argv[4] != "guest" || q.Env["OPENBLAS_NUM_THREADS"] != "1" {
				t.Errorf("request %.80q in %v", q.Argv, q.Env)
			}
			return exec(name, int(calls.Add(1)))
		}
		base = cfg
		t.Cleanup(func() { clean(t, cfg, svc) })
		engines = append(engines, GuestEngine{Name: name, Version: name + " 1.0", Open: func(context.Context) (*forkd.Client, func() error, error) {
			return cfg.Client, func() error { stops.Add(1); return nil }, nil
		}})
	}
	return base, engines, &stops
}

func TestGuest(t *testing.T) {
	cfg, engines, stops := guestRig(t, func(engine string, call int) (agentwire.ExecResult, error) {
		factor := float64(call)
		if engine == "two" {
			factor *= 10
		}
		return agentwire.ExecResult{Stdout: []byte(said(factor, 46368))}, nil
	})
	r, err := Guest(t.Context(), cfg, engines, GuestOptions{Snapshot: "py-base", Runs: 3, Rounds: 2})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Engines) != 2 || r.Engines[0].MS["cpu_fib"] != 2 || r.Engines[1].MS["numpy_matmul"] != 40 || r.Engines[0].Version != "one 1.0" ||
		len(r.Engines[0].Ratio) != 0 || r.Native.Skipped == "" || stops.Load() != 2 {
		t.Errorf("%+v, %d daemons stopped", r, stops.Load())
	}
}

// TestGuestFails: what a guest says is compared, and a failure ends the daemon.
func TestGuestFails(t *testing.T) {
	for name, c := range map[string]struct {
		exec  func(engine string, call int) (agentwire.ExecResult, error)
		class error
	}{
		"another answer": {func(engine string, _ int) (agentwire.ExecResult, error) {
			return agentwire.ExecResult{Stdout: []byte(said(1, engine))}, nil
		}, ErrAnswers},
		"no JSON": {func(string, int) (agentwire.ExecResult, error) {
			return agentwire.ExecResult{Stdout: []byte("hello")}, nil
		}, ErrAnswers},
		"no times": {func(string, int) (agentwire.ExecResult, error) {
			return agentwire.ExecResult{Stdout: []byte("{}")}, nil
		}, ErrAnswers},
		"it fails": {func(string, int) (agentwire.ExecResult, error) {
			return agentwire.ExecResult{ExitCode: 1, Stderr: []byte("ImportError")}, nil
		}, errdefs.ErrGuest},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, engines, stops := guestRig(t, c.exec)
			_, err := Guest(t.Context(), cfg, engines, GuestOptions{Snapshot: "py-base", Runs: 1, Rounds: 1})
			if !errors.Is(err, c.class) || stops.Load() == 0 {
				t.Errorf("error is %v, %d daemons stopped", err, stops.Load())
			}
		})
	}
	cfg, _, _ := guestRig(t, nil)
	if _, err := Guest(t.Context(), cfg, nil, GuestOptions{Runs: 1, Rounds: 1}); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("no engine: %v", err)
	}
	for _, o := range []GuestOptions{{Runs: 0, Rounds: 1}, {Runs: 1, Rounds: 0}, {Runs: 1 << 20, Rounds: 1}} {
		if o.Validate() == nil {
			t.Errorf("%+v is valid", o)
		}
	}
}

// standIn is as much of numpy as the script needs, so that the test needs none.
const standIn = `
__version__, float64 = "0.0", float
class M:
    def reshape(self, *n): return self
    def __truediv__(self, n): return self
    def __matmul__(self, other): return self
    def max(self): return 1.0
    def sum(self): return 1.0
def arange(n, dtype=None): return M()
`

// TestGuestScript runs the script here, as in a guest and as natively.
func TestGuestScript(t *testing.T) {
	modules := t.TempDir()
	if err := os.WriteFile(filepath.Join(modules, "numpy.py"), []byte(standIn), 0o600); err != nil {
		t.Fatal(err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	g := guestBench{}
	for _, place := range []string{"guest", "native"} {
		cmd := exec.CommandContext(t.Context(), "python3", "-c", guestScript, "1", place)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+modules, "PYTHONDONTWRITEBYTECODE=1")
		cmd.ExtraFiles = []*os.File{null, dir}
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		r, err := g.parse(string(out), time.Second)
		if err != nil || len(r.MS) != len(GuestWorks()) || r.TotalMS <= 0 || r.Check["cpu_fib"] != 46368.0 || r.Check["files"] != 2000.0 || r.Check["import_numpy"] != "0.0" {
			t.Errorf("%s: %+v, %v", place, r, err)
		}
		if left, err := os.ReadDir(dir.Name()); err != nil || len(left) > 0 {
			t.Errorf("%s left %v (%v)", place, left, err)
		}
	}
}

func TestGoldenGuestReport(t *testing.T) {
	r := &GuestReport{
		Bench: "guest", Snapshot: "py-base", Runs: 5, Rounds: 2, Work: GuestWorks(), Command: "forkd bench guest --runs 5",
		Native: GuestNative{MS: Times{}, How: "python by chroot"}, Machine: about("guest").Machine,
		Skipped: []GuestSkip{{"kvm", "the kvm engine is not part of this version"}},
	}
	for i, name := range []string{"qemu", "gvisor"} {
		e := GuestResult{
			Engine: name, Version: name + " 1.0", Isolation: "vm-emulated", MemoryMiB: 512, MS: Times{}, NativeMS: Times{}, Ratio: Times{},
			FilesOn: "tmpfs", Python: "3.11.2", Numpy: "1.24.2", ClockRatio: 0.99,
		}
		for j, w := range r.Work {
			native := float64(10 * (j + 1))
			r.Native.MS[w.Name], e.NativeMS[w.Name] = native, native
			e.Ratio[w.Name] = []float64{17, 1.1}[i]
			e.MS[w.Name] = round(native*e.Ratio[w.Name], 2)
		}
		r.Engines = append(r.Engines, e)
	}
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "guest.json", string(raw)+"\n")
	var text bytes.Buffer
	if err := WriteGuestMarkdown(&text, r); err != nil {
		t.Fatal(err)
	}
	golden(t, "guest.md", text.String())
	charts, err := GuestCharts(r)
	if err != nil || len(charts["-ratio"]) == 0 {
		t.Errorf("charts: %d, %v", len(charts), err)
	}
	r.Engines[0].Ratio = Times{}
	if charts, err := GuestCharts(r); err != nil || len(charts) != 0 {
		t.Errorf("without native figures: %d charts, %v", len(charts), err)
	}
	for _, w := range r.Work {
		if !strings.Contains(guestScript, fmt.Sprintf("def %s():", w.Name)) {
			t.Errorf("the script has no %s", w.Name)
		}
	}
}
