package bench

import (
	"context"
	"errors"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
)

// The names of the baselines.
const (
	BaselineProcess  = "process"
	BaselineRunc     = "runc"
	BaselineColdBoot = "cold_boot"
)

// Bounds of a measurement.
const (
	maxForks = 1000
	maxRuns  = 1000
)

// ForkOptions say what Fork measures.
type ForkOptions struct {
	Snapshot  string
	Counts    []int // how many at once, one report each
	Runs      int
	MemoryMiB int // 0 is the snapshot's; else one of that size is made for the measurement
	Pool      Pool
	Baselines []string
}

// Validate tells what is wrong with o.
func (o ForkOptions) Validate() error {
	if len(o.Counts) == 0 {
		return errdefs.New(errdefs.ErrInvalid, "say how many forks to measure")
	}
	for _, n := range o.Counts {
		if n < 1 || n > maxForks {
			return errdefs.New(errdefs.ErrInvalid, "cannot measure %d forks at once: 1 to %d are possible", n, maxForks)
		}
	}
	if o.Runs < 1 || o.Runs > maxRuns {
		return errdefs.New(errdefs.ErrInvalid, "%d runs asked for, 1 to %d are possible", o.Runs, maxRuns)
	}
	if o.MemoryMiB < 0 {
		return errdefs.New(errdefs.ErrInvalid, "%d MiB of memory asked for", o.MemoryMiB)
	}
	for _, b := range o.Baselines {
		if b != BaselineProcess && b != BaselineRunc && b != BaselineColdBoot {
			return errdefs.New(errdefs.ErrInvalid, "there is no baseline %.40q: %s, %s and %s are there", b, BaselineProcess, BaselineRunc, BaselineColdBoot)
		}
	}
	return o.Pool.validate()
}

func (p Pool) validate() error {
	switch p {
	case PoolNone, PoolBlank, PoolWarm:
		return nil
	}
	return errdefs.New(errdefs.ErrInvalid, "there is no pool %.40q: %s, %s and %s are there", string(p), PoolWarm, PoolBlank, PoolNone)
}

// Fork measures forks and the baselines in turn. With [ErrAnswers] the reports are
// there all the same.
func Fork(ctx context.Context, cfg Config, o ForkOptions) (_ []ForkReport, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	machine := probeMachine(ctx, cfg) // before anything loads it
	s, err := openSubject(ctx, cfg, o.Snapshot, o.MemoryMiB)
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err != nil {
		return nil, err
	}
	wanted := map[string]bool{}
	for _, b := range o.Baselines {
		wanted[b] = true
	}
	other, err := openOpponents(ctx, s, wanted)
	defer func() { err = errors.Join(err, other.close(ctx)) }()
	if err != nil {
		return nil, err
	}
	if err := s.savePools(ctx); err != nil {
		return nil, err
	}
	if wanted[BaselineColdBoot] {
		if other.about.ColdBoot, err = s.coldBoot(ctx); err != nil {
			return nil, err
		}
	}
	var reports []ForkReport
	for _, n := range o.Counts {
		runs, err := s.runs(ctx, o, n, other)
		if err != nil {
			return nil, err
		}
		r := newForkReport(n, s, o, runs)
		r.complete(other.about, machine, cfg.Command)
		reports = append(reports, r)
	}
	return reports, answers(reports)
}

// complete adds what does not come from the runs.
func (r *ForkReport) complete(about Baselines, m Machine, command string) {
	b := &r.Baselines
	b.Process.How, b.Process.Skipped = about.Process.How, about.Process.Skipped
	b.Runc.How, b.Runc.Skipped = about.Runc.How, about.Runc.Skipped
	b.ColdBoot = about.ColdBoot
	r.Machine, r.Command = m, command
	r.ratios()
}

// answers fails if an answer is wrong or missing.
func answers(reports []ForkReport) error {
	for _, r := range reports {
		for i, run := range r.Runs {
			if run.Answered < r.N {
				why := ""
				if len(run.Failures) > 0 {
					why = ": " + run.Failures[0]
				}
				return fmt.Errorf("%w: run %d: %d of %d%s", ErrAnswers, i+1, run.Answered, r.N, why)
			}
		}
	}
	return nil
}

// runs measures n forks and the baselines o.Runs times, in turn.
func (s *subject) runs(ctx context.Context, o ForkOptions, n int, other *opponents) ([]ForkRun, error) {
	runs := make([]ForkRun, 0, o.Runs)
	for i := range o.Runs {
		if err := s.emptyPools(ctx); err != nil {
			return nil, err
		}
		var base ForkRun
		if err := other.run(ctx, s.cfg, n, &base); err != nil {
			return nil, err
		}
		p, err := s.prepare(ctx, o.Pool, n)
		if err != nil {
			return nil, err
		}
		s.cfg.step("run %d of %d: forking %d (pool: %s)", i+1, o.Runs, n, o.Pool)
		r, err := s.forks(ctx, n)
		if err != nil {
			return nil, err
		}
		r.PoolPrepareMS, r.PoolPrepareCPUSPerFork = p.tookMS, p.cpuSPerFork
		r.ProcessTotalMS, r.processCPU, r.RuncTotalMS, r.runcCPU = base.ProcessTotalMS, base.processCPU, base.RuncTotalMS, base.runcCPU
		runs = append(runs, r)
	}
	return runs, nil
}
