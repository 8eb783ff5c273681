package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// BranchOptions say what Branch measures: a row for each of DirtyMiB and Freeze with
// the first of Children, and for the others of Children with ChildrenDirtyMiB.
type BranchOptions struct {
	Snapshot  string
	Mode      string // live, diff or full
	Runs      int    // consecutive branches for each row
	DirtyMiB  []int
	Freeze    []bool
	Children  []int
	MemoryMiB int // 0 is the snapshot's; else one of that size is made for the measurement
}

// childrenDirtyMiB is what is written before branches with several children.
const childrenDirtyMiB = 10

// Validate tells what is wrong with o.
func (o BranchOptions) Validate() error {
	switch {
	case o.Mode != "live" && o.Mode != "diff" && o.Mode != "full":
		return errdefs.New(errdefs.ErrInvalid, "there is no mode %.40q: live, diff and full are there", o.Mode)
	case o.Runs < 1 || o.Runs > maxRuns:
		return errdefs.New(errdefs.ErrInvalid, "%d branches asked for, 1 to %d are possible", o.Runs, maxRuns)
	case len(o.DirtyMiB) == 0 || len(o.Freeze) == 0 || len(o.Children) == 0:
		return errdefs.New(errdefs.ErrInvalid, "there is nothing to measure: say what is dirty and how many children there are")
	case o.MemoryMiB < 0:
		return errdefs.New(errdefs.ErrInvalid, "%d MiB of memory asked for", o.MemoryMiB)
	}
	for _, mib := range o.DirtyMiB {
		if mib < 1 || mib > 64<<10 {
			return errdefs.New(errdefs.ErrInvalid, "cannot write %d MiB before a branch: 1 to 65536 are possible", mib)
		}
	}
	for _, n := range o.Children {
		if n < 0 || n > maxForks {
			return errdefs.New(errdefs.ErrInvalid, "cannot measure %d children: 0 to %d are possible", n, maxForks)
		}
	}
	return nil
}

// BranchReport is the result of measuring branches. The names in JSON stay; figures
// are medians over the branches of a row, and null where they could not be measured.
type BranchReport struct {
	About
	StallSkipped string      `json:"stall_skipped,omitempty"` // why there are no stalls
	Rows         []BranchRow `json:"rows"`
}

// BranchRow is some consecutive branches of one sandbox.
type BranchRow struct {
	Mode          string   `json:"mode"`
	Freeze        bool     `json:"freeze"`
	DirtyMiB      int      `json:"dirty_mib"`  // written before each branch
	CopiedMiB     float64  `json:"copied_mib"` // as the daemon tells
	PauseMS       float64  `json:"pause_ms"`   // likewise
	StallMS       *float64 `json:"stall_ms"`   // seen by the host from the request until the snapshot is ready
	StallMaxMS    *float64 `json:"stall_max_ms"`
	CallMS        float64  `json:"call_ms"` // in mode live with wait=false
	LayerBytes    int64    `json:"layer_bytes"`
	ChildAnswerMS *float64 `json:"child_answer_ms"` // fork of the branch to the answer of one child
	Children      int      `json:"children"`

	ReadyMS         float64     `json:"ready_ms"`         // request until the snapshot is written and proven
	ChildrenStallMS *float64    `json:"source_fork_ms"`   // the source stood still while the children came up
	LastToSecond    *float64    `json:"last_to_second"`   // call of the last branch divided by that of the second
	Runs            []BranchRun `json:"runs"`             // in order
	DaemonStallMS   float64     `json:"daemon_stall_ms"`  // as the daemon tells
	StallCallMS     *float64    `json:"stall_in_call_ms"` // of stall_ms, what the call itself caused
}

// BranchRun is one branch.
type BranchRun struct {
	CopiedMiB     float64  `json:"copied_mib"`
	PauseMS       float64  `json:"pause_ms"`
	CallMS        float64  `json:"call_ms"`
	ReadyMS       float64  `json:"ready_ms"`
	LongestMS     *float64 `json:"longest_ms"` // without change of the counter
	IdleMS        *float64 `json:"idle_ms"`    // the same in an equal time without capture
	StallMS       *float64 `json:"stall_ms"`
	StallCallMS   *float64 `json:"stall_in_call_ms"`
	SourceForkMS  *float64 `json:"source_fork_ms"`
	ChildAnswerMS *float64 `json:"child_answer_ms"`
	LayerBytes    int64    `json:"layer_bytes"`

	daemonStallMS float64
}

// Branch measures branches of a running sandbox.
func Branch(ctx context.Context, cfg Config, o BranchOptions) (_ *BranchReport, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	s, machine, err := openQuiet(ctx, cfg, o.Snapshot, o.MemoryMiB)
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err != nil {
		return nil, err
	}
	if most := slices.Max(o.DirtyMiB); most > s.memoryMiB/2 {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "cannot write %d MiB in machines of %d MiB", most, s.memoryMiB),
			"give them more with --memory, e.g. --memory %dM", 3*most)
	}
	r := &BranchReport{About: s.about("branch", machine)}
	for _, row := range o.rows() {
		if err := s.branchRow(ctx, r, row, o.Runs); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// rows are the rows to measure, without figures.
func (o BranchOptions) rows() []BranchRow {
	var rows []BranchRow
	for i, n := range o.Children {
		dirty := o.DirtyMiB
		if i > 0 {
			dirty = []int{min(childrenDirtyMiB, slices.Max(dirty))}
		}
		for _, mib := range dirty {
			for _, freeze := range o.Freeze {
				rows = append(rows, BranchRow{Mode: o.Mode, Freeze: freeze, DirtyMiB: mib, Children: n})
			}
		}
	}
	return rows
}

// brancher branches one source again and again.
type brancher struct {
	s   *subject
	id  string
	row *BranchRow
	w   *watch // nil: stalls cannot be seen
}

// branchRow measures a row with a source of its own.
func (s *subject) branchRow(ctx context.Context, r *BranchReport, row BranchRow, runs int) (err error) {
	sb, err := s.source(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.kill(ctx, []string{sb.ID}), s.removeMarkedAfter(ctx)) }()
	b := &brancher{s: s, id: sb.ID, row: &row}
	read, err := s.sourceCounter(ctx, sb)
	if err != nil && !errors.Is(err, errdefs.ErrUnavailable) {
		return err
	}
	if err != nil {
		r.StallSkipped = err.Error()
	} else {
		b.w = startWatch(read)
		defer b.w.close()
	}
	for i := range runs {
		s.cfg.step("%d MiB dirty, freeze %t, %s: branch %d of %d", row.DirtyMiB, row.Freeze, children(row.Children), i+1, runs)
		run, err := b.one(ctx, i)
		if err != nil {
			return fmt.Errorf("branch %s: %w", sb.ID, err)
		}
		row.Runs = append(row.Runs, run)
	}
	row.complete()
	r.Rows = append(r.Rows, row)
	return nil
}

func children(n int) string {
	if n == 1 {
		return "1 child"
	}
	return fmt.Sprintf("%d children", n)
}

// removeMarkedAfter is removeMarked, also if ctx has ended.
func (s *subject) removeMarkedAfter(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTime)
	defer cancel()
	if s.throwaway { // its own snapshot has the mark as well; close removes all
		return nil
	}
	return s.removeMarked(ctx)
}

// sourceCounter starts the counter in a sandbox and finds it from here.
func (s *subject) sourceCounter(ctx context.Context, sb forkd.Sandbox) (func() (uint64, error), error) {
	if sb.PID == nil || (s.meter.daemon == 0 && s.cfg.counter == nil) {
		return nil, errdefs.New(errdefs.ErrUnavailable, "the daemon's machines are no processes of this host, so their memory cannot be seen")
	}
	marker, err := startCounter(ctx, s.cfg.Client, sb.ID)
	if err != nil {
		return nil, err
	}
	if s.cfg.counter != nil {
		return s.cfg.counter(*sb.PID, marker)
	}
	find := func() (func() (uint64, error), error) { return findCounter(*sb.PID, marker, guestMemory) }
	if sb.Isolation == string(engine.IsolationUserKernel) {
		find = func() (func() (uint64, error), error) { return findCounterInFile(*sb.PID, marker, gvisorMemory) }
	}
	read, err := find()
	if err != nil {
		return nil, errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("see the memory of the machine, which needs root: %w", err))
	}
	return read, nil
}

// one makes a branch and its children.
func (b *brancher) one(ctx context.Context, i int) (run BranchRun, err error) {
	if err := b.s.dirty(ctx, b.id, b.row.DirtyMiB, 0, i); err != nil {
		return run, err
	}
	wait := b.row.Mode != "live"
	req := forkd.BranchRequest{
		Mode: b.row.Mode, Wait: &wait, Freeze: &b.row.Freeze, Tag: fmt.Sprintf("bench-%s-%s-%d", b.s.mark, b.id[:8], i),
		Labels: map[string]string{markLabel: b.s.mark}, Replace: true,
	}
	from := time.Now()
	made, err := b.s.cfg.Client.Branch(ctx, b.id, req)
	called := time.Now()
	if err != nil {
		return run, err
	}
	sn, err := b.s.ready(ctx, made.ID)
	if err != nil {
		return run, err
	}
	to := time.Now()
	run = BranchRun{
		CopiedMiB: round(float64(made.CopiedBytes)/(1<<20), 2), CallMS: millis(called.Sub(from)), ReadyMS: millis(to.Sub(from)),
		LayerBytes: sn.MemoryBytes + sn.DiskBytes, daemonStallMS: made.StallMS,
	}
	if made.PauseMS != nil {
		run.PauseMS = round(*made.PauseMS, 2)
	}
	if err := b.stall(ctx, &run, from, called, to); err != nil {
		return run, err
	}
	return run, b.children(ctx, &run, made.ID)
}

// stall fills in what the counter told between from and to. The same is watched
// again for as long without a capture.
func (b *brancher) stall(ctx context.Context, run *BranchRun, from, called, to time.Time) error {
	if b.w == nil {
		return nil
	}
	longest, err := b.w.longest(ctx, from, to)
	if err != nil {
		return err
	}
	inCall, err := b.w.longest(ctx, from, called)
	if err != nil {
		return err
	}
	if err := pass(ctx, restAfter); err != nil {
		return err
	}
	quiet := time.Now()
	if err := pass(ctx, to.Sub(from)); err != nil {
		return err
	}
	idle, err := b.w.longest(ctx, quiet, time.Now())
	if err != nil {
		return err
	}
	run.LongestMS, run.IdleMS = ptr(millis(longest)), ptr(millis(idle))
	run.StallMS, run.StallCallMS = ptr(millis(max(longest-idle, 0))), ptr(millis(max(inCall-idle, 0)))
	return nil
}

// restAfter is time for what follows a capture, before the source is watched idle.
const restAfter = 200 * time.Millisecond

// pass waits for d.
func pass(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// children forks the branch, and tells how long the source stood still meanwhile.
func (b *brancher) children(ctx context.Context, run *BranchRun, id string) error {
	if b.row.Children == 0 {
		return nil
	}
	of := b.s.of(id)
	if err := of.emptyPools(ctx); err != nil {
		return err
	}
	from := time.Now()
	forks, err := of.forks(ctx, b.row.Children)
	if err != nil {
		return err
	}
	if forks.Answered != b.row.Children {
		return fmt.Errorf("%w: %d of %d: %v", ErrAnswers, forks.Answered, b.row.Children, forks.Failures)
	}
	run.ChildAnswerMS = ptr(forks.P50MS)
	if b.w == nil {
		return nil
	}
	longest, err := b.w.longest(ctx, from, from.Add(time.Duration(forks.TotalMS*float64(time.Millisecond))))
	run.SourceForkMS = ptr(millis(longest))
	return err
}

// complete fills the figures of a row from its runs.
func (r *BranchRow) complete() {
	med := func(value func(BranchRun) float64) float64 {
		return *medianOf(r.Runs, func(run BranchRun) *float64 { return ptr(value(run)) })
	}
	r.CopiedMiB = med(func(run BranchRun) float64 { return run.CopiedMiB })
	r.PauseMS = med(func(run BranchRun) float64 { return run.PauseMS })
	r.CallMS = med(func(run BranchRun) float64 { return run.CallMS })
	r.ReadyMS = med(func(run BranchRun) float64 { return run.ReadyMS })
	r.DaemonStallMS = med(func(run BranchRun) float64 { return run.daemonStallMS })
	r.LayerBytes = int64(med(func(run BranchRun) float64 { return float64(run.LayerBytes) }))
	r.StallMS = medianOf(r.Runs, func(run BranchRun) *float64 { return run.StallMS })
	r.StallCallMS = medianOf(r.Runs, func(run BranchRun) *float64 { return run.StallCallMS })
	r.ChildAnswerMS = medianOf(r.Runs, func(run BranchRun) *float64 { return run.ChildAnswerMS })
	r.ChildrenStallMS = medianOf(r.Runs, func(run BranchRun) *float64 { return run.SourceForkMS })
	for _, run := range r.Runs {
		if run.StallMS != nil && (r.StallMaxMS == nil || *run.StallMS > *r.StallMaxMS) {
			r.StallMaxMS = ptr(*run.StallMS)
		}
	}
	if n := len(r.Runs); n > 2 && r.Runs[1].CallMS > 0 {
		r.LastToSecond = ptr(round(r.Runs[n-1].CallMS/r.Runs[1].CallMS, 2))
	}
}
