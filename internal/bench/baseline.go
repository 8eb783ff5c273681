package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// pythonCode is the work of the baselines: what FirstCall does, in a new process.
const pythonCode = "import numpy; print(numpy.__version__)"

// baselineEnv is the whole environment of the baselines' Python.
func baselineEnv() []string {
	return []string{"PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/", "PYTHONDONTWRITEBYTECODE=1"}
}

// command makes the i-th process of a baseline.
type command func(ctx context.Context, i int) *exec.Cmd

// sample is what n processes needed.
type sample struct {
	totalMS  float64
	cpuSEach float64
}

// measure runs n processes, as many at a time as there are processors, each of
// which must print want, and ends with the last of them.
func (c command) measure(ctx context.Context, n int, want string) (sample, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	jobs := make(chan int)
	cpu := make([]time.Duration, n)
	var wg sync.WaitGroup
	start := time.Now()
	for range min(runtime.NumCPU(), n) {
		wg.Go(func() {
			for i := range jobs {
				used, err := run(c(ctx, i), want)
				if err != nil {
					cancel(err)
				}
				cpu[i] = used
			}
		})
	}
	for i := range n {
		select {
		case jobs <- i:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(jobs)
	wg.Wait()
	total := time.Since(start)
	if err := context.Cause(ctx); err != nil {
		return sample{}, err
	}
	var sum time.Duration
	for _, d := range cpu {
		sum += d
	}
	return sample{millis(total), round(sum.Seconds()/float64(n), 4)}, nil
}

// maxOutput bounds what is kept of a baseline's output.
const maxOutput = 1 << 10

// run runs one process and returns the processor time it and its children took.
func run(cmd *exec.Cmd, want string) (time.Duration, error) {
	var out, errOut head
	cmd.Stdout, cmd.Stderr = &out, &errOut
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if err != nil {
		return 0, fmt.Errorf("run %s: %w: %s", cmd.Args[0], err, errOut.String())
	}
	if got := strings.TrimSpace(out.String()); got != want {
		return 0, fmt.Errorf("%s printed %.80q instead of %q: %w", cmd.Args[0], got, want, ErrAnswers)
	}
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}

// head keeps the start of what is written to it.
type head struct{ bytes.Buffer }

func (h *head) Write(p []byte) (int, error) {
	if room := maxOutput - h.Len(); room > 0 {
		h.Buffer.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

// opponents are the baselines that run beside the forks.
type opponents struct {
	process, runc command // nil: skipped, the baseline says why
	about         Baselines
	want          string
	close         func(ctx context.Context) error
}

// openOpponents prepares the baselines that wanted names.
func openOpponents(ctx context.Context, s *subject, wanted map[string]bool) (*opponents, error) {
	o := &opponents{want: strings.Trim(s.answer, "'"), close: func(context.Context) error { return nil }}
	const unasked = "not asked for"
	o.about.Process.Skipped, o.about.Runc.Skipped, o.about.ColdBoot.Skipped = unasked, unasked, unasked
	if !wanted[BaselineProcess] && !wanted[BaselineRunc] {
		return o, nil
	}
	s.cfg.step("copying the image's files for the baselines")
	t, err := copyImage(ctx, s)
	if reason := new(skip); errors.As(err, &reason) {
		o.skipBoth(wanted, reason.why)
		return o, nil
	}
	if err != nil {
		return o, err
	}
	o.close = t.remove
	if wanted[BaselineProcess] {
		o.process, o.about.Process = t.processes(), Baseline{How: t.processHow()}
	}
	if wanted[BaselineRunc] {
		o.runc, err = t.containers(ctx)
		o.about.Runc = Baseline{How: t.runcHow(ctx)}
		if reason := new(skip); errors.As(err, &reason) {
			o.about.Runc, err = Baseline{Skipped: reason.why}, nil
		}
	}
	if err != nil {
		return o, err
	}
	return o, o.rehearse(ctx)
}

// rehearse runs each once, so that the files are in memory as they are for the
// guests' image. What does not give the right answer then is skipped: runc may not
// work here, or the snapshot may have another numpy than its image.
func (o *opponents) rehearse(ctx context.Context) error {
	for _, b := range []struct {
		cmd   *command
		about *Baseline
	}{{&o.process, &o.about.Process}, {&o.runc, &o.about.Runc}} {
		if *b.cmd == nil {
			continue
		}
		if _, err := b.cmd.measure(ctx, 1, o.want); err != nil {
			*b.cmd, *b.about = nil, Baseline{Skipped: "a first try failed: " + err.Error()}
		}
	}
	return ctx.Err()
}

func (o *opponents) skipBoth(wanted map[string]bool, why string) {
	if wanted[BaselineProcess] {
		o.about.Process.Skipped = why
	}
	if wanted[BaselineRunc] {
		o.about.Runc.Skipped = why
	}
}

// run measures n of each and puts it into r.
func (o *opponents) run(ctx context.Context, cfg Config, n int, r *ForkRun) error {
	for _, b := range []struct {
		name  string
		cmd   command
		total **float64
		cpu   **float64
	}{
		{"plain processes", o.process, &r.ProcessTotalMS, &r.processCPU},
		{"runc containers", o.runc, &r.RuncTotalMS, &r.runcCPU},
	} {
		if b.cmd == nil {
			continue
		}
		cfg.step("running %d %s", n, b.name)
		got, err := b.cmd.measure(ctx, n, o.want)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return errdefs.WithHint(fmt.Errorf("measure %s: %w", b.name, err), "leave it out with --baselines")
		}
		*b.total, *b.cpu = ptr(got.totalMS), ptr(got.cpuSEach)
	}
	return nil
}

// skip is the reason why a baseline cannot be measured here.
type skip struct{ why string }

func (s *skip) Error() string { return s.why }
