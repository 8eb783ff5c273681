package bench

import (
	"bytes"
	"context"
	_ "embed" // for the script
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// guestScript is the work, one script for every place it is done in.
//
//go:embed guest.py
var guestScript string

// GuestWork is one kind of work of user code.
type GuestWork struct {
	Name string `json:"name"`
	What string `json:"what"`
}

// GuestWorks lists the kinds of work. Their names in JSON stay.
func GuestWorks() []GuestWork {
	return []GuestWork{
		{"cpu_fib", "fib(24) in Python"},
		{"numpy_matmul", "5 products of 300x300 matrices"},
		{"json_loop", "500 dumps, loads, dumps of 50 keys"},
		{"syscall_write", "50,000 writes of a byte to /dev/null"},
		{"files", "2,000 files created, stat'ed, removed on a tmpfs"},
		{"subprocess_true", "20 subprocesses"},
		{"memory_touch", "a byte in each page of 100 MiB"},
		{"import_numpy", "a new Python that imports numpy"},
	}
}

// GuestOptions say what Guest measures.
type GuestOptions struct {
	Snapshot string
	Runs     int // forks of each engine, and native runs in turn with them
	Rounds   int // of each work in a run; the best counts
}

// Validate tells what is wrong with o.
func (o GuestOptions) Validate() error {
	switch {
	case o.Runs < 1 || o.Runs > maxRuns:
		return errdefs.New(errdefs.ErrInvalid, "cannot measure %d runs: 1 to %d are possible", o.Runs, maxRuns)
	case o.Rounds < 1 || o.Rounds > 100:
		return errdefs.New(errdefs.ErrInvalid, "cannot measure %d rounds: 1 to 100 are possible", o.Rounds)
	}
	return nil
}

// GuestEngine is an engine to measure.
type GuestEngine struct {
	Name    string
	Version string
	// Open connects to a daemon that runs it; stop ends what that started.
	Open func(ctx context.Context) (c *forkd.Client, stop func() error, err error)
}

// Times are milliseconds by the name of the work.
type Times map[string]float64

// GuestReport is the result of measuring user code. The names in JSON stay.
type GuestReport struct {
	Bench    string        `json:"bench"`
	Snapshot string        `json:"snapshot"`
	Runs     int           `json:"runs"`
	Rounds   int           `json:"rounds"`
	Work     []GuestWork   `json:"work"`
	Native   GuestNative   `json:"native"`
	Engines  []GuestResult `json:"engines"`
	Skipped  []GuestSkip   `json:"skipped"` // engines that are not measured
	Command  string        `json:"command"`
	Machine  Machine       `json:"machine"`
}

// GuestNative is the same work without a sandbox: medians over all runs.
type GuestNative struct {
	MS      Times  `json:"ms"`
	How     string `json:"how,omitempty"`
	Skipped string `json:"skipped,omitempty"`
}

// GuestResult is the work in forks of one engine.
type GuestResult struct {
	Engine    string `json:"engine"`
	Version   string `json:"version"`
	Isolation string `json:"isolation"`
	MemoryMiB int    `json:"memory_mib"`
	MS        Times  `json:"ms"`        // medians over the runs
	NativeMS  Times  `json:"native_ms"` // of the native runs in turn with them
	Ratio     Times  `json:"ratio"`     // of the two
	FilesOn   string `json:"files_on"`  // what file system
	Python    string `json:"python"`
	Numpy     string `json:"numpy"`
	// ClockRatio is the time of all runs by the guest's clock, divided by this host's
	// around the calls, which hold the interpreter's start as well: near 1 if the
	// guest's clock is right.
	ClockRatio float64 `json:"clock_ratio"`
}

// GuestSkip says why an engine is not measured.
type GuestSkip struct {
	Engine string `json:"engine"`
	Why    string `json:"why"`
}

// guestRun is what one run of the script gave.
type guestRun struct {
	MS      Times          `json:"ms"`
	TotalMS float64        `json:"total_ms"` // of all rounds, by its own clock
	Check   map[string]any `json:"check"`
	FilesOn string         `json:"files_on"`
	Python  string         `json:"python"`
	Numpy   string         `json:"numpy"`

	took time.Duration // by our clock
}

// Guest measures user code in forks of each engine, in turn with the same code
// natively. Answers that differ between two places are [ErrAnswers].
func Guest(ctx context.Context, cfg Config, engines []GuestEngine, o GuestOptions) (_ *GuestReport, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if len(engines) == 0 {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "no engine works here"), "see: forkd engine ls")
	}
	r := &GuestReport{Bench: "guest", Snapshot: o.Snapshot, Runs: o.Runs, Rounds: o.Rounds, Work: GuestWorks(), Command: cfg.Command, Skipped: []GuestSkip{}}
	g := &guestBench{cfg: cfg, o: o, report: r}
	defer func() { err = errors.Join(err, g.close(ctx)) }()
	for _, e := range engines {
		if err := g.engine(ctx, e); err != nil {
			return nil, fmt.Errorf("measure engine %s: %w", e.Name, err)
		}
	}
	r.Native.MS = medians(g.native)
	return r, nil
}

// guestBench is a measurement under way.
type guestBench struct {
	cfg     Config
	o       GuestOptions
	report  *GuestReport
	tree    *imageTree // nil until an engine's image could be copied
	scratch *tempDir   // directory on a tmpfs for the native runs
	native  []guestRun
	check   map[string]any // the answers of the first run
}

func (g *guestBench) close(ctx context.Context) error {
	var errs []error
	if g.tree != nil {
		errs = append(errs, g.tree.remove(ctx))
	}
	if g.scratch != nil {
		errs = append(errs, g.scratch.remove())
	}
	return errors.Join(errs...)
}

// engine measures one engine.
func (g *guestBench) engine(ctx context.Context, e GuestEngine) (err error) {
	c, stop, err := e.Open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	cfg := g.cfg
	cfg.Client = c
	s, machine, err := openQuiet(ctx, cfg, g.o.Snapshot, 0)
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err != nil {
		return err
	}
	if len(g.report.Engines) == 0 {
		g.report.Machine = machine
	}
	if err := g.openNative(ctx, s); err != nil {
		return err
	}
	var forks, natives []guestRun
	for i := range g.o.Runs {
		cfg.step("run %d of %d in a fork of engine %s", i+1, g.o.Runs, s.engine)
		run, err := g.inFork(ctx, s)
		if err != nil {
			return err
		}
		forks = append(forks, run)
		if g.tree == nil {
			continue
		}
		cfg.step("run %d of %d natively", i+1, g.o.Runs)
		if run, err = g.natively(ctx); err != nil {
			return err
		}
		natives = append(natives, run)
	}
	g.native = append(g.native, natives...)
	g.report.Engines = append(g.report.Engines, guestResult(s, e.Version, forks, natives))
	return nil
}

func guestResult(s *subject, version string, forks, natives []guestRun) GuestResult {
	r := GuestResult{
		Engine: s.engine, Version: version, Isolation: s.isolation, MemoryMiB: s.memoryMiB,
		MS: medians(forks), NativeMS: medians(natives), Ratio: Times{},
		FilesOn: forks[0].FilesOn, Python: forks[0].Python, Numpy: forks[0].Numpy,
	}
	for name, native := range r.NativeMS {
		if native > 0 {
			r.Ratio[name] = round(r.MS[name]/native, 2)
		}
	}
	var guest, host float64
	for _, f := range forks {
		guest += f.TotalMS
		host += millis(f.took)
	}
	if host > 0 {
		r.ClockRatio = round(guest/host, 3)
	}
	return r
}

// medians of each work over runs.
func medians(runs []guestRun) Times {
	out := Times{}
	for _, w := range GuestWorks() {
		var all []float64
		for _, r := range runs {
			if ms, ok := r.MS[w.Name]; ok {
				all = append(all, ms)
			}
		}
		if len(all) > 0 {
			out[w.Name] = round(median(all), 2)
		}
	}
	return out
}

// guestEnv is the environment of the script, the same everywhere.
func guestEnv() map[string]string {
	out := map[string]string{"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
	for _, kv := range baselineEnv() {
		name, value, _ := strings.Cut(kv, "=")
		out[name] = value
	}
	return out
}

func (g *guestBench) args(place string) []string {
	return []string{"/usr/bin/python3", "-c", guestScript, strconv.Itoa(g.o.Rounds), place}
}

// guestTimeout bounds one run; under emulation it takes half a minute.
const guestTimeout = 15 * time.Minute

// inFork runs the script in a fork of its own.
func (g *guestBench) inFork(ctx context.Context, s *subject) (_ guestRun, err error) {
	sb, err := s.source(ctx)
	if err != nil {
		return guestRun{}, err
	}
	defer func() { err = errors.Join(err, s.kill(ctx, []string{sb.ID})) }()
	limit := guestTimeout.Seconds()
	start := time.Now()
	res, err := s.cfg.Client.Exec(ctx, sb.ID, forkd.ExecRequest{Args: g.args("guest"), Env: guestEnv(), TimeoutSecs: &limit})
	took := time.Since(start)
	if err != nil {
		return guestRun{}, err
	}
	if res.ExitCode != 0 {
		return guestRun{}, errdefs.New(errdefs.ErrGuest, "the script ended with %d in a fork of engine %s: %.300s", res.ExitCode, s.engine, res.Stderr)
	}
	return g.parse(res.Stdout, took)
}

// natively runs the script by chroot into a copy of the image.
func (g *guestBench) natively(ctx context.Context) (guestRun, error) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return guestRun{}, fmt.Errorf("run natively: %w", err)
	}
	defer null.Close()
	dir, err := os.Open(g.scratch.path)
	if err != nil {
		return guestRun{}, fmt.Errorf("run natively: %w", err)
	}
	defer dir.Close()
	args := g.args("native")
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = "/"
	for name, value := range guestEnv() {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.ExtraFiles = []*os.File{null, dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: g.tree.root, Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, Setpgid: true}
	cmd.WaitDelay = time.Second
	var out bytes.Buffer // it is our script
	var errOut head
	cmd.Stdout, cmd.Stderr = &out, &errOut
	start := time.Now()
	if err := cmd.Run(); err != nil {
		return guestRun{}, fmt.Errorf("run natively: %w: %.300s", err, errOut.String())
	}
	return g.parse(out.String(), time.Since(start))
}

// parse reads what the script printed, and compares its answers with those before.
func (g *guestBench) parse(text string, took time.Duration) (guestRun, error) {
	r := guestRun{took: took}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return r, fmt.Errorf("the script printed %.80q: %w", text, ErrAnswers)
	}
	for _, w := range GuestWorks() {
		if ms, ok := r.MS[w.Name]; !ok || ms <= 0 {
			return r, fmt.Errorf("no time of %s: %w", w.Name, ErrAnswers)
		}
	}
	if g.check == nil {
		g.check = r.Check
	}
	if !reflect.DeepEqual(r.Check, g.check) {
		return r, fmt.Errorf("the work gave %v, elsewhere it gave %v: %w", r.Check, g.check, ErrAnswers)
	}
	return r, nil
}

// openNative makes the copy of the image for native runs, once.
func (g *guestBench) openNative(ctx context.Context, s *subject) error {
	if g.tree != nil {
		return nil
	}
	s.cfg.step("copying the image's files for the native runs")
	tree, err := copyImage(ctx, s)
	if reason := new(skip); errors.As(err, &reason) {
		g.report.Native.Skipped = reason.why
		return nil
	}
	if err != nil {
		return err
	}
	g.tree = tree
	if g.scratch, err = newTempDir("/dev/shm"); err == nil {
		err = os.Chmod(g.scratch.path, 0o777) // the script runs as nobody
	}
	if err != nil {
		return fmt.Errorf("make a directory for the native runs: %w", err)
	}
	g.report.Native.Skipped = ""
	g.report.Native.How = tree.processHow() + "; files on the host's /dev/shm"
	return nil
}
