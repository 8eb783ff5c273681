package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Bounds of a measurement of rollouts.
const (
	maxRollouts    = 1_000_000
	maxConcurrency = 256
)

// The daemon's memory is looked at every rssEvery rollouts, and may not leave
// rssTolerance of what it was after rssWarm of them.
const (
	rssEvery     = 100
	rssWarm      = 200
	rssTolerance = 5.0 // percent
)

// RolloutOptions say what Rollouts measures.
type RolloutOptions struct {
	Snapshot    string
	Count       int
	Concurrency int
}

// Validate tells what is wrong with o.
func (o RolloutOptions) Validate() error {
	switch {
	case o.Count < 1 || o.Count > maxRollouts:
		return errdefs.New(errdefs.ErrInvalid, "cannot measure %d rollouts: 1 to %d are possible", o.Count, maxRollouts)
	case o.Concurrency < 1 || o.Concurrency > maxConcurrency:
		return errdefs.New(errdefs.ErrInvalid, "cannot run %d rollouts at a time: 1 to %d are possible", o.Concurrency, maxConcurrency)
	}
	return nil
}

// RolloutReport is the result of a loop of fork, eval and kill. The names in JSON
// stay; figures are null where they could not be measured.
type RolloutReport struct {
	Engine        string         `json:"engine"`
	Count         int            `json:"count"`
	Answered      int            `json:"answered"`
	Concurrency   int            `json:"concurrency"`
	TotalS        float64        `json:"total_s"`
	RolloutsPerS  float64        `json:"rollouts_per_s"`
	P50MS         float64        `json:"p50_ms"` // fork, eval and kill of one
	P90MS         float64        `json:"p90_ms"`
	P99MS         float64        `json:"p99_ms"`
	MaxMS         float64        `json:"max_ms"`
	AnswerP50MS   float64        `json:"answer_p50_ms"` // request to the first answer
	AnswerP99MS   float64        `json:"answer_p99_ms"`
	CPUSPerRoll   *float64       `json:"cpu_s_per_rollout"`
	Leaks         Leaks          `json:"leaks"`
	RSS           []RSSSample    `json:"daemon_rss"`
	RSSGrowth     *float64       `json:"daemon_rss_growth_percent"` // last sample against the one after 200
	Claimed       map[string]int `json:"claimed"`
	Machine       Machine        `json:"machine"`
	Isolation     string         `json:"isolation"`
	Snapshot      string         `json:"snapshot"`
	MemoryMiB     int            `json:"memory_mib"`
	Command       string         `json:"command"`
	FirstFailures []string       `json:"failures,omitempty"`
}

// RSSSample is the daemon's resident memory after so many rollouts.
type RSSSample struct {
	Rollouts int   `json:"rollouts"`
	KiB      int64 `json:"kib"`
}

// roller runs the loop.
type roller struct {
	s    *subject
	rss  func() int64 // KiB, 0 if unknown
	next chan int

	mu sync.Mutex
	// +checklocks:mu
	whole []float64
	// +checklocks:mu
	answers []float64
	// +checklocks:mu
	ended int
	// +checklocks:mu
	claimed map[string]int
	// +checklocks:mu
	samples []RSSSample
	// +checklocks:mu
	failures []string
}

// Rollouts measures a loop of fork, eval and kill, and looks for what is left
// afterwards. With [ErrAnswers] or [ErrLeak] the report is there all the same.
func Rollouts(ctx context.Context, cfg Config, o RolloutOptions) (_ *RolloutReport, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	machine := probeMachine(ctx, cfg)
	s, err := openSubject(ctx, cfg, o.Snapshot, 0)
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	if err != nil {
		return nil, err
	}
	look := &inspector{
		fs: s.meter.fs, daemon: s.meter.daemon, cgroup: s.group, idle: cfg.Client.Close,
		sandboxes: filepath.Join(filepath.Dir(filepath.Dir(s.detail.Dir)), "sandboxes"),
	}
	// A few first: what the daemon makes once, and its pool, is no leak.
	if _, err := s.roll(ctx, RolloutOptions{Count: 2 * o.Concurrency, Concurrency: o.Concurrency}, look); err != nil {
		return nil, err
	}
	cfg.step("waiting for the daemon to come to rest")
	before, err := look.atRest(ctx, nil)
	if err != nil {
		return nil, err
	}
	cpu, start := s.meter.read(), time.Now()
	r, err := s.roll(ctx, o, look)
	if err != nil {
		return nil, err
	}
	took := time.Since(start)
	report := r.report(o, took)
	report.CPUSPerRoll = s.meter.since(cpu, o.Count)
	cfg.step("looking for what is left")
	after, err := look.atRest(ctx, before)
	if err != nil {
		return nil, err
	}
	report.Leaks = newLeaks(before, after)
	report.Machine, report.Command = machine, cfg.Command
	return report, report.verdict()
}

// verdict fails if an answer is missing or something is left.
func (r *RolloutReport) verdict() error {
	if r.Answered < r.Count {
		why := ""
		if len(r.FirstFailures) > 0 {
			why = ": " + r.FirstFailures[0]
		}
		return fmt.Errorf("%w: %d of %d rollouts%s", ErrAnswers, r.Answered, r.Count, why)
	}
	if len(r.Leaks.Leaked) > 0 {
		return fmt.Errorf("%w after %d rollouts: %s", ErrLeak, r.Count, r.Leaks.text())
	}
	if r.RSSGrowth != nil && *r.RSSGrowth > rssTolerance {
		return fmt.Errorf("%w: the daemon's memory grew by %.1f %% from rollout %d to %d", ErrLeak, *r.RSSGrowth, rssWarm, r.Count)
	}
	return nil
}

// roll runs the loop; a failed rollout is counted and the loop goes on.
func (s *subject) roll(ctx context.Context, o RolloutOptions, look *inspector) (*roller, error) {
	r := &roller{s: s, rss: look.rss, next: make(chan int), claimed: map[string]int{}}
	var wg sync.WaitGroup
	for range o.Concurrency {
		wg.Go(func() {
			for range r.next {
				r.count(r.one(ctx))
			}
		})
	}
	for i := range o.Count {
		if i%10 == 0 && s.cfg.Progress != nil {
			s.cfg.Progress(fmt.Sprintf("%d rollouts, %d at a time", o.Count, o.Concurrency), float64(i)/float64(o.Count))
		}
		select {
		case r.next <- i:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(r.next)
	wg.Wait()
	return r, ctx.Err()
}

// outcome is one rollout.
type outcome struct {
	answerMS, wholeMS float64
	pool              string
	err               error
}

func (r *roller) one(ctx context.Context) (o outcome) {
	start := time.Now()
	made, err := r.s.fork(ctx, 1, nil)
	if err != nil || len(made) != 1 {
		return outcome{err: cmpErr(err, errdefs.New(errdefs.ErrInternal, "no sandbox came"))}
	}
	sb := made[0]
	o.pool = sb.Timing.Pool
	answer, err := r.s.ask(ctx, sb.ID)
	o.answerMS = millis(time.Since(start))
	if err == nil && answer != r.s.answer {
		err = fmt.Errorf("answered %.80q instead of %q: %w", answer, r.s.answer, ErrAnswers)
	}
	o.err = errors.Join(err, r.s.kill(ctx, []string{sb.ID}))
	o.wholeMS = millis(time.Since(start))
	return o
}

func cmpErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

func (r *roller) count(o outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended++
	if o.err != nil {
		if len(r.failures) < maxFailures {
			r.failures = append(r.failures, o.err.Error())
		}
	} else {
		r.whole, r.answers = append(r.whole, o.wholeMS), append(r.answers, o.answerMS)
		r.claimed[o.pool]++
	}
	if r.ended%rssEvery == 0 {
		if kib := r.rss(); kib > 0 {
			r.samples = append(r.samples, RSSSample{r.ended, kib})
		}
	}
}

func (r *roller) report(o RolloutOptions, took time.Duration) *RolloutReport {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &RolloutReport{
		Engine: r.s.engine, Isolation: r.s.isolation, Snapshot: r.s.name, MemoryMiB: r.s.memoryMiB,
		Count: o.Count, Concurrency: o.Concurrency, Answered: len(r.whole),
		TotalS: round(took.Seconds(), 2), RolloutsPerS: round(float64(len(r.whole))/took.Seconds(), 2),
		P50MS: percentile(r.whole, 50), P90MS: percentile(r.whole, 90), P99MS: percentile(r.whole, 99), MaxMS: percentile(r.whole, 100),
		AnswerP50MS: percentile(r.answers, 50), AnswerP99MS: percentile(r.answers, 99),
		RSS: append([]RSSSample{}, r.samples...), RSSGrowth: growth(r.samples), Claimed: r.claimed, FirstFailures: r.failures,
	}
}

// growth compares the last sample with the one after rssWarm rollouts, in percent.
func growth(samples []RSSSample) *float64 {
	for i, s := range samples {
		if s.Rollouts == rssWarm && i < len(samples)-1 {
			last := samples[len(samples)-1]
			return ptr(round(100*(float64(last.KiB)/float64(s.KiB)-1), 2))
		}
	}
	return nil
}
