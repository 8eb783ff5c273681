package enginetest

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// reopen closes the driver and opens another, as a daemon that is upgraded does.
func (s *suite) reopen(t *testing.T) {
	t.Helper()
	s.noError(t, "close the driver", s.d.Close())
	s.d = s.h.Open(t)
}

func (s *suite) testAdopt(t *testing.T) {
	spec := s.spec(t)
	b := &box{chain: s.base}
	var err error
	b.m, err = s.d.Restore(s.ctx(t), spec, s.base)
	s.noError(t, "restore", err)
	s.wake(t, b)
	s.put(t, b, "kept", "over restarts", "/root/kept", "over restarts")
	before := b.m
	_ = b.guest.Close() // as the end of a process does
	s.reopen(t)
	select {
	case <-before.Done():
		t.Error("Done is closed by the end of the driver, though the machine goes on")
	default:
	}
	ids, err := s.d.Orphans(s.ctx(t))
	s.noError(t, "list machines", err)
	if !slices.Equal(ids, []string{spec.ID}) {
		t.Errorf("machines listed by a new driver are %v, want %s", ids, spec.ID)
	}
	b.m, err = s.d.Adopt(s.ctx(t), spec.ID, spec.Dir)
	s.noError(t, "adopt", err)
	if b.m.ID() != spec.ID || b.m.PID() != before.PID() {
		t.Errorf("adopted machine %s with pid %d, want %s with %d", b.m.ID(), b.m.PID(), spec.ID, before.PID())
	}
	s.dial(t, b)
	s.want(t, b, "kept", "over restarts", "/root/kept", "over restarts")
	s.want(t, b, rootKey, rootText, rootFile, rootText)
	s.checkUsage(t, b.m)
	chain := s.capture(t, b, engine.AfterEnd)
	child := s.fork(t, chain)
	s.want(t, child, "kept", "over restarts", "/root/kept", "over restarts")
	s.adoptAndKill(t, child)
}

// adoptAndKill: an adopted machine can be killed, and its end is noticed.
func (s *suite) adoptAndKill(t *testing.T, b *box) {
	t.Helper()
	crashing := s.fork(t, b.chain)
	_, _ = b.guest.Close(), crashing.guest.Close()
	s.reopen(t)
	for _, one := range []*box{b, crashing} {
		m, err := s.d.Adopt(s.ctx(t), one.m.ID(), filepath.Join(s.h.Dir, one.m.ID()))
		s.noError(t, "adopt", err)
		one.m = m
	}
	s.noError(t, "kill an adopted machine", b.m.Kill(s.ctx(t)))
	s.ended(t, b.m)
	s.h.Crash(t, crashing.m)
	s.ended(t, crashing.m)
}

func (s *suite) testAdoptNothing(t *testing.T) {
	notFound := func(what, id, dir string) {
		t.Helper()
		if _, err := s.d.Adopt(s.ctx(t), id, dir); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("adopt %s: error is %v, want class not found", what, err)
		}
	}
	empty := s.spec(t)
	notFound("an empty directory", empty.ID, empty.Dir)
	notFound("a directory that is not there", empty.ID, filepath.Join(s.h.Dir, "nowhere"))
	b := s.fork(t, s.base)
	dir := filepath.Join(s.h.Dir, b.m.ID())
	notFound("a machine by the record of another", empty.ID, dir)
	s.noError(t, "ping after that", b.guest.Ping(s.ctx(t)))
	s.kill(t, b)
	notFound("a machine that was killed", b.m.ID(), dir)
	s.reopen(t)
	notFound("a machine that was killed before the restart", b.m.ID(), dir)
}

func (s *suite) testPool(t *testing.T) {
	if s.lacks(t, Pooling) {
		return
	}
	p, ok := s.d.(engine.Pooler)
	if !ok {
		t.Fatal("the driver is no engine.Pooler and does not declare that")
	}
	id := s.base[len(s.base)-1].ID
	var mu sync.Mutex
	var made []string
	newSpec := func() (engine.Spec, error) {
		spec := s.spec(t)
		mu.Lock()
		defer mu.Unlock()
		made = append(made, spec.ID)
		return spec, nil
	}
	if m := p.Claim(id); m != nil || p.Pooled(id) != 0 {
		t.Fatalf("a pool nobody asked for has %d machines", p.Pooled(id))
	}
	p.Prepare(s.base, 2, newSpec)
	s.eventually(t, "the pool has 2 machines", func() bool { return p.Pooled(id) == 2 })
	m := p.Claim(id)
	if m == nil {
		t.Fatal("nothing to claim from a pool of 2")
	}
	mu.Lock()
	known := slices.Contains(made, m.ID())
	mu.Unlock()
	if !known {
		t.Errorf("claimed machine %s is not of a spec that newSpec made", m.ID())
	}
	b := &box{m: m, chain: s.base}
	s.wake(t, b)
	s.want(t, b, rootKey, rootText, rootFile, rootText)
	s.limit(t, b)
	s.eventually(t, "the pool is full again", func() bool { return p.Pooled(id) == 2 })
	p.Prepare(s.base, 0, nil)
	s.eventually(t, "the pool is empty", func() bool { return p.Pooled(id) == 0 && s.count(t) == 1 })
	s.noError(t, "ping a claimed machine", b.guest.Ping(s.ctx(t)))
	s.poolEnds(t, newSpec)
	_ = b.guest.Close()
	s.noError(t, "reap", s.d.Reap(s.ctx(t), b.m.ID(), filepath.Join(s.h.Dir, b.m.ID())))
}

// limit: a machine that was claimed goes on within limits it was not made with.
func (s *suite) limit(t *testing.T, b *box) {
	t.Helper()
	l, ok := s.d.(engine.Limiter)
	if !ok {
		return
	}
	ctx := s.ctx(t)
	limits := engine.Limits{MemoryMiB: max(2*s.h.Shape.MemoryMiB, s.d.Probe(ctx).MinMemoryLimitMiB), PIDs: 100, CPUPercent: 90}
	s.noError(t, "limit a claimed machine", l.Limit(ctx, b.m.ID(), limits))
	s.noError(t, "ping it", b.guest.Ping(ctx))
	limits.MemoryMiB *= 4 // up again
	s.noError(t, "limit it again", l.Limit(ctx, b.m.ID(), limits))
	s.noError(t, "ping it", b.guest.Ping(ctx))
	if err := l.Limit(ctx, "sb00000000000000000000", limits); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("limit a machine that is not there: %v", err)
	}
}

// poolEnds: prepared machines end with Forget and with Close; others do not.
func (s *suite) poolEnds(t *testing.T, newSpec func() (engine.Spec, error)) {
	t.Helper()
	id := s.base[len(s.base)-1].ID
	p := s.d.(engine.Pooler)
	p.Prepare(s.base, 1, newSpec)
	s.eventually(t, "the pool has a machine", func() bool { return p.Pooled(id) == 1 })
	s.d.Forget(id)
	if n := p.Pooled(id); n != 0 {
		t.Errorf("%d machines of a forgotten snapshot are pooled", n)
	}
	s.eventually(t, "they have ended", func() bool { return s.count(t) == 1 })
	p.Prepare(s.base, 1, newSpec)
	s.eventually(t, "the pool has a machine", func() bool { return p.Pooled(id) == 1 })
	s.reopen(t)
	if n := s.count(t); n != 1 {
		t.Errorf("%d machines are left by a driver that closed, want the claimed one", n)
	}
}

func (s *suite) count(t *testing.T) int {
	t.Helper()
	ids, err := s.d.Orphans(s.ctx(t))
	s.noError(t, "list machines", err)
	for _, id := range ids {
		if _, err := os.Stat(filepath.Join(s.h.Dir, id)); err != nil {
			t.Errorf("machine %s has no directory of ours", id)
		}
	}
	return len(ids)
}

// eventually waits for what happens in the background.
func (s *suite) eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	const step = 10 * time.Millisecond
	tick := time.NewTicker(step)
	defer tick.Stop()
	deadline := s.ctx(t)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.Done():
			t.Fatalf("it did not happen within %v that %s", s.h.Patience, what)
		}
	}
}
