package sandbox

import (
	"context"
	"slices"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Admission: before anything is created for a call, room for all of it is
// reserved. What binds is the number of living sandboxes and the memory budget:
// a share of what the host has available now, against a reserve for each sandbox
// that is admitted but has not shown yet what it needs. Prepared warm machines
// give way first. A call that waits is served in order, and nobody overtakes it.

// reserveMiB is what a new sandbox is expected to need: QEMU's own memory and the
// pages it will touch first.
const reserveMiB = 48

// MaxWait bounds how long a call may wait for room.
const MaxWait = 10 * time.Minute

// room is what was reserved for one call. It shrinks as its sandboxes register.
type room struct {
	s    *Service
	left int // guarded by s.mu
}

// waiter is a call that waits for room for n.
type waiter struct {
	n     int
	ready chan struct{} // closed when it may look again
}

// admit reserves room for n sandboxes, waiting for it at most wait.
func (s *Service) admit(ctx context.Context, what string, n int, wait time.Duration) (*room, error) {
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	var w *waiter
	defer func() { s.leaveQueue(w) }()
	for {
		r, fits, binds, err := s.tryAdmit(n, w)
		if err != nil || r != nil {
			return r, err
		}
		if s.yieldWarm(n - fits) {
			continue
		}
		if wait == 0 {
			return nil, noRoom(what, n, fits, binds)
		}
		if w == nil {
			w = s.joinQueue(n)
			continue // room may have come in between
		}
		select {
		case <-w.ready:
			s.rearm(w)
		case <-deadline.C:
			return nil, noRoom(what, n, fits, binds)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func noRoom(what string, n, fits int, binds string) error {
	return errdefs.WithHint(errdefs.New(errdefs.ErrResourceExhausted, "cannot %s %d sandboxes: %d more fit (%s binds)", what, n, max(fits, 0), binds),
		"ask for fewer, wait for room, or end some with: forkd kill")
}

// tryAdmit reserves room if there is any and nobody is before w.
func (s *Service) tryAdmit(n int, w *waiter) (_ *room, fits int, binds string, err error) {
	available, err := availableMiB()
	if err != nil {
		return nil, 0, "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	living := s.reserved
	for _, e := range s.entries {
		if e.snapshot().State.living() {
			living++
		}
	}
	fits, binds = s.cfg.MaxSandboxes-living, "the limit of living sandboxes"
	if byMemory := available/reserveMiB - s.reserved; byMemory < fits {
		fits, binds = byMemory, "memory"
	}
	if first := s.queue; len(first) > 0 && first[0] != w {
		fits, binds = 0, "others who wait"
	}
	if n > fits {
		return nil, fits, binds, nil
	}
	s.reserved += n
	return &room{s: s, left: n}, fits, "", nil
}

func (s *Service) joinQueue(n int) *waiter {
	w := &waiter{n: n, ready: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = append(s.queue, w)
	return w
}

func (s *Service) rearm(w *waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.ready = make(chan struct{})
}

// leaveQueue takes w out; the next one looks again.
func (s *Service) leaveQueue(w *waiter) {
	if w == nil {
		return
	}
	s.mu.Lock()
	s.queue = slices.DeleteFunc(s.queue, func(q *waiter) bool { return q == w })
	s.mu.Unlock()
	s.roomCame()
}

// roomCame tells the first who waits that something was freed.
func (s *Service) roomCame() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		return
	}
	select {
	case <-s.queue[0].ready: // told already
	default:
		close(s.queue[0].ready)
	}
}

// take turns the reservation of one into a registered sandbox.
func (r *room) take() {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if r.left > 0 {
		r.left--
		r.s.reserved--
	}
}

// release gives back what was not taken.
func (r *room) release() {
	r.s.mu.Lock()
	r.s.reserved -= r.left
	r.left = 0
	r.s.mu.Unlock()
	r.s.roomCame()
}
