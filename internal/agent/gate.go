package agent

import (
	"context"
	"sync"
	"time"
)

// gate is shut while user processes are frozen: nothing new starts, and the time
// does not count against anybody's timeout.
type gate struct {
	mu sync.Mutex
	// +checklocks:mu
	open chan struct{} // closed while the gate is open
	// +checklocks:mu
	since time.Time // of the freeze; zero while open
	// +checklocks:mu
	total time.Duration // frozen before
}

func (g *gate) init() {
	g.open = make(chan struct{})
	close(g.open)
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.since.IsZero() {
		g.since = time.Now()
		g.open = make(chan struct{})
	}
}

func (g *gate) reopen() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.since.IsZero() {
		g.total += time.Since(g.since)
		g.since = time.Time{}
		close(g.open)
	}
}

// opened returns a channel that is closed once the gate is open, and the time
// it was shut before.
func (g *gate) opened() (chan struct{}, time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open, g.total
}

// pass waits until the gate is open.
func (g *gate) pass(ctx context.Context) error {
	open, _ := g.opened()
	select {
	case <-open:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.since.IsZero()
}

// waitEnd is why await returned.
type waitEnd int

const (
	waitDone waitEnd = iota
	waitTimeout
	waitCanceled
)

// clock returns a function that tells what is left of timeout, which runs only
// while the gate is open.
func (g *gate) clock(timeout time.Duration) func() time.Duration {
	_, before := g.opened()
	begin := time.Now()
	return func() time.Duration {
		_, total := g.opened()
		return timeout - (time.Since(begin) - (total - before))
	}
}

// await waits for done, at most timeout of time in which the gate is open.
func (g *gate) await(ctx context.Context, done <-chan struct{}, timeout time.Duration) waitEnd {
	clock := g.clock(timeout)
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		select {
		case <-done:
			return waitDone
		case <-ctx.Done():
			return waitCanceled
		case <-timer.C:
		}
		open, _ := g.opened()
		select {
		case <-open:
		case <-done:
			return waitDone
		case <-ctx.Done():
			return waitCanceled
		}
		left := clock()
		if left <= 0 {
			return waitTimeout
		}
		timer.Reset(left)
	}
}
