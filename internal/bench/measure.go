package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	forkd "forkd.dev/forkd/sdk/go"
)

// maxFailures is how many failed children are told in words.
const maxFailures = 5

// asker asks children as they come up, a few at a time.
type asker struct {
	s     *subject
	start time.Time
	slots chan struct{}
	wg    sync.WaitGroup

	mu sync.Mutex
	// +checklocks:mu
	times []float64
	// +checklocks:mu
	failures []string
	// +checklocks:mu
	last time.Time
}

// ready sends the first call to a child that came up. It does not wait.
func (a *asker) ready(ctx context.Context, index int, sb forkd.Sandbox) {
	a.wg.Go(func() {
		select {
		case a.slots <- struct{}{}:
			defer func() { <-a.slots }()
		case <-ctx.Done():
			a.failed(index, ctx.Err())
			return
		}
		answer, err := a.s.ask(ctx, sb.ID)
		now := time.Now()
		switch {
		case err != nil:
			a.failed(index, err)
		case answer != a.s.answer:
			a.failed(index, fmt.Errorf("answered %.80q instead of %q: %w", answer, a.s.answer, ErrAnswers))
		default:
			a.mu.Lock()
			defer a.mu.Unlock()
			a.times = append(a.times, millis(now.Sub(a.start)))
			if now.After(a.last) {
				a.last = now
			}
		}
	})
}

func (a *asker) failed(index int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.failures) < maxFailures {
		a.failures = append(a.failures, fmt.Sprintf("child %d: %v", index, err))
	}
}

// forks measures one fork of n, from the request to the last first answer, and
// ends the children.
func (s *subject) forks(ctx context.Context, n int) (_ ForkRun, err error) {
	a := &asker{s: s, slots: make(chan struct{}, 2*runtime.NumCPU())}
	var ids []string
	defer func() { err = errors.Join(err, s.kill(ctx, ids)) }()
	r := ForkRun{claimed: map[string]int{}}
	cpu := s.meter.read()
	a.start = time.Now()
	_, err = s.fork(ctx, n, func(index int, sb forkd.Sandbox) {
		ids = append(ids, sb.ID)
		r.claimed[sb.Timing.Pool]++
		a.ready(ctx, index, sb)
	})
	a.wg.Wait()
	if err != nil {
		return r, err
	}
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	r.CPUSPerFork = s.meter.since(cpu, n)
	a.mu.Lock()
	r.children, r.Failures = slices.Sorted(slices.Values(a.times)), a.failures
	if !a.last.IsZero() {
		r.TotalMS = millis(a.last.Sub(a.start))
	}
	a.mu.Unlock()
	r.Answered = len(r.children)
	if missing := n - len(ids); missing > 0 {
		r.Failures = append(r.Failures, fmt.Sprintf("%d of %d did not come up", missing, n))
	}
	r.P50MS, r.P90MS, r.P99MS = percentile(r.children, 50), percentile(r.children, 90), percentile(r.children, 99)
	r.MaxMS = percentile(r.children, 100)
	r.PSSKiBPerChild, err = s.memory(ctx, ids)
	return r, err
}

// memory returns the mean proportional set size of living sandboxes.
func (s *subject) memory(ctx context.Context, ids []string) (float64, error) {
	var sum float64
	seen := 0
	for _, id := range ids {
		sb, err := s.cfg.Client.Sandbox(ctx, id)
		if err != nil {
			return 0, fmt.Errorf("ask for the memory of %s: %w", id, err)
		}
		if sb.Usage != nil {
			sum += float64(sb.Usage.PSSKiB)
			seen++
		}
	}
	if seen == 0 {
		return 0, nil
	}
	return round(sum/float64(seen), 0), nil
}
