package sandbox

import (
	"cmp"
	"context"
	"slices"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Admission: before anything is created for a call, room for all of it is
// reserved. What binds is the number of living sandboxes and the memory budget:
// what all machines occupy now and a reserve for each sandbox that is admitted
// but has not shown yet what it needs. Prepared machines of other snapshots give
// way first. A call that waits is served in order, and nobody overtakes it.

// reserveMiB is what a new sandbox is expected to need where forks share their
// snapshot's memory ([plan.reserveMiB] for others): the machine's own memory and the
// pages it will touch first.
const reserveMiB = 48

// MaxWait bounds how long a call may wait for room.
const MaxWait = 10 * time.Minute

// lookAgain is how often one who waits measures the host's memory anew.
const lookAgain = time.Second

// demand is what a call asks room for.
type demand struct {
	what string // a verb, for error texts
	n    int
	wait time.Duration
	// eachMiB is what each is expected to need; 0 means reserveMiB.
	eachMiB int
	// snapshot, if set, is the one whose warm machines the call will claim.
	snapshot string
	// refill: it makes a warm machine, for which no other one gives way.
	refill bool
}

func (d demand) each() int { return cmp.Or(d.eachMiB, reserveMiB) }

// room is what was reserved for one call. It shrinks as its sandboxes register.
type room struct {
	s       *Service
	eachMiB int
	left    int // guarded by s.mu
}

// waiter is a call that waits for room for n.
type waiter struct {
	n     int
	ready chan struct{} // closed when it may look again
}

// shortage says why a demand is not met.
type shortage struct {
	fits     int
	binds    string
	yielding bool // warm machines could make room
}

// admit reserves room for d.n sandboxes, waiting for it at most d.wait.
func (s *Service) admit(ctx context.Context, d demand) (*room, error) {
	deadline := time.NewTimer(d.wait)
	defer deadline.Stop()
	// Memory that other programs give back is announced by nobody.
	look := time.NewTicker(lookAgain)
	defer look.Stop()
	var w *waiter
	defer func() { s.leaveQueue(w) }()
	for {
		r, short, err := s.tryAdmit(d, w)
		if err != nil || r != nil {
			return r, err
		}
		if short.yielding && !d.refill && (s.yieldSpares() || s.yieldWarm(d.n-short.fits, d.snapshot) || s.yieldBlank(d.snapshot)) {
			continue
		}
		if d.wait == 0 {
			return nil, noRoom(d, short)
		}
		if w == nil {
			w = s.joinQueue(d.n)
			continue // room may have come in between
		}
		select {
		case <-w.ready:
			s.rearm(w)
		case <-look.C:
		case <-deadline.C:
			return nil, noRoom(d, short)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func noRoom(d demand, short shortage) error {
	waited := ""
	if d.wait > 0 {
		waited = " after " + d.wait.String()
	}
	return errdefs.WithHint(errdefs.New(errdefs.ErrResourceExhausted, "cannot %s %d sandboxes: %d more fit%s (%s)", d.what, d.n, max(short.fits, 0), waited, short.binds),
		"ask for fewer, wait for room (--wait 30s), or end some with: forkd kill")
}

// tryAdmit reserves room if there is any and nobody is before w.
func (s *Service) tryAdmit(d demand, w *waiter) (*room, shortage, error) {
	mem, err := s.readMemory()
	if err != nil {
		return nil, shortage{}, err
	}
	// Machines that the call will claim have their memory already.
	roomMiB := mem.roomMiB() + s.claimableMiB(d)
	s.mu.Lock()
	defer s.mu.Unlock()
	living := s.reserved
	for _, e := range s.entries {
		if e.snapshot().State.living() {
			living++
		}
	}
	short := shortage{fits: s.cfg.MaxSandboxes - living, binds: "the limit of living sandboxes binds, see --max-sandboxes"}
	if byMemory := (roomMiB - s.reservedMiB) / d.each(); byMemory < short.fits {
		short = shortage{fits: byMemory, binds: mem.binds(), yielding: true}
	}
	if first := s.queue; len(first) > 0 && first[0] != w {
		short = shortage{binds: "others who wait come first"}
	}
	if d.n > short.fits {
		return nil, short, nil
	}
	s.reserved += d.n
	s.reservedMiB += d.n * d.each()
	return &room{s: s, eachMiB: d.each(), left: d.n}, shortage{}, nil
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

// roomCame tells the first who waits that something was freed, or the warm pools if
// nobody does.
func (s *Service) roomCame() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		s.warm.roomCame()
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
		r.s.reservedMiB -= r.eachMiB
	}
}

// release gives back what was not taken.
func (r *room) release() {
	r.s.mu.Lock()
	r.s.reserved -= r.left
	r.s.reservedMiB -= r.left * r.eachMiB
	r.left = 0
	r.s.mu.Unlock()
	r.s.roomCame()
}
