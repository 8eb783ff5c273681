package sandbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// entry is a sandbox the service knows: living, or ended and still readable.
type entry struct {
	link    *link          // nil if it ended before this daemon started
	machine engine.Machine // likewise
	release func()         // gives the lease on its snapshot back; may be nil

	mu sync.Mutex
	// +checklocks:mu
	info Sandbox
	// +checklocks:mu
	used time.Time // when its agent was last asked for something
	// +checklocks:mu
	auto autoState
	// +checklocks:mu
	changed chan struct{} // closed when the state or what is owed changes; nil if nobody waits
}

// active notes that the sandbox is in use.
func (e *entry) active() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.used = time.Now()
}

// lastActivity is when it was last used, or came up.
func (e *entry) lastActivity() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.used.IsZero() {
		return e.info.CreatedAt
	}
	return e.used
}

func (e *entry) snapshot() Sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.info
}

func (e *entry) update(fn func(*Sandbox)) Sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	before := e.info
	fn(&e.info)
	if (e.info.State != before.State || e.info.owed != before.owed || e.info.replaced != before.replaced) && e.changed != nil {
		close(e.changed)
		e.changed = nil
	}
	return e.info
}

// left waits until the sandbox is not in state.
func (e *entry) left(ctx context.Context, state State) error {
	return e.wait(ctx, func(sb Sandbox) bool { return sb.State != state })
}

// thawed waits until the guest of a running sandbox is not frozen any more by a capture
// that was cut short.
func (e *entry) thawed(ctx context.Context) error {
	return e.wait(ctx, func(sb Sandbox) bool { return sb.State != Running || sb.owed == "" })
}

// wait waits until the sandbox is as asked.
func (e *entry) wait(ctx context.Context, ok func(Sandbox) bool) error {
	for {
		e.mu.Lock()
		info := e.info
		if ok(info) {
			e.mu.Unlock()
			return nil
		}
		if e.changed == nil {
			e.changed = make(chan struct{})
		}
		changed := e.changed
		e.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for sandbox %s, which is %s: %w", info.ID, info.State, ctx.Err())
		}
	}
}

// living tells whether the sandbox has a machine.
func (s State) living() bool {
	switch s {
	case Creating, Running, Paused, Capturing, RollingBack, Stopping:
		return true
	}
	return false
}

// register makes e known and starts to watch its machine.
func (s *Service) register(e *entry) {
	info := e.snapshot()
	s.mu.Lock()
	s.entries[info.ID] = e
	if info.Name != "" && (info.State.living() || info.State == Lost) {
		s.names[info.Name] = info.ID
	}
	s.mu.Unlock()
	if e.machine != nil {
		s.group.Go(func() { s.watch(e) })
	}
}

// watch waits for the end of a machine. An end nobody asked for is a failure of
// the sandbox, whose reason stays readable.
func (s *Service) watch(e *entry) {
	select {
	case <-s.ctx.Done():
		return
	case <-e.machine.Done():
	}
	e.link.close()
	expected := false
	info := e.update(func(sb *Sandbox) {
		expected = sb.State == Stopping || !sb.State.living()
		if !expected {
			s.lose(sb, e.machine.Reason())
		}
	})
	if expected {
		return
	}
	s.cfg.Log("sandbox %s ended: %s", info.ID, info.Reason)
	if info.State == Failed {
		s.freeName(info)
	}
	s.roomCame()
	if e.release != nil {
		e.release()
	}
	s.collect(info.base())
	if err := s.discard(info.machine()); err != nil {
		s.cfg.Log("%v", err)
	}
	if err := s.journal(context.Background(), e.snapshot()); err != nil {
		s.cfg.Log("record the end of %s: %v", info.ID, err)
	}
}

// reprieve makes a sandbox whose machine ended lost instead of failed: it has got a
// checkpoint since, which was being written.
func (s *Service) reprieve(ctx context.Context, e *entry) {
	failed := false
	info := e.update(func(sb *Sandbox) {
		if failed = sb.State == Failed; failed {
			sb.State, sb.EndedAt = Lost, time.Time{}
		}
	})
	if !failed {
		return
	}
	s.mu.Lock()
	taken := s.names[info.Name] != ""
	if info.Name != "" && !taken {
		s.names[info.Name] = info.ID
	}
	s.mu.Unlock()
	if taken {
		info = e.update(func(sb *Sandbox) { sb.Name = "" })
	}
	if err := s.journal(ctx, info); err != nil {
		s.cfg.Log("record that %s can come back: %v", info.ID, err)
	}
}

func (s *Service) freeName(info Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if info.Name != "" && s.names[info.Name] == info.ID {
		delete(s.names, info.Name)
	}
}

// end stops a sandbox and forgets it. If that fails the sandbox stays known, and
// end may be repeated.
func (s *Service) end(ctx context.Context, e *entry, reason string) error {
	var before Sandbox
	e.update(func(sb *Sandbox) {
		before = *sb
		sb.State = Stopping
	})
	if before.State == Stopping {
		return errdefs.New(errdefs.ErrConflict, "sandbox %s is being ended already", before.ID)
	}
	// From here on it ends, whatever becomes of the caller.
	ctx = context.WithoutCancel(ctx)
	if err := s.remove(ctx, e); err != nil {
		s.endFailed(ctx, e, before, reason)
		return err
	}
	s.freeName(before)
	s.mu.Lock()
	delete(s.entries, before.ID)
	s.mu.Unlock()
	s.dropSpareOf(before.ID)
	s.dropCheckpoints(before.ID)
	s.collect(before.base())
	s.roomCame()
	return nil
}

// remove frees all that a sandbox has. It may be repeated.
func (s *Service) remove(ctx context.Context, e *entry) error {
	if e.machine != nil {
		if err := e.machine.Kill(ctx); err != nil {
			return err
		}
		e.link.close()
	}
	if e.release != nil {
		e.release()
	}
	info := e.snapshot()
	if err := s.discard(info.machine()); err != nil {
		return err
	}
	return s.cfg.Journal.DeleteSandboxes(ctx, info.ID)
}

// endFailed gives a sandbox that could not be removed the state it is in.
func (s *Service) endFailed(ctx context.Context, e *entry, before Sandbox, reason string) {
	if e.alive() || !before.State.living() {
		e.update(func(sb *Sandbox) { sb.State = before.State })
		return
	}
	info := e.update(func(sb *Sandbox) {
		sb.State, sb.Reason, sb.EndedAt, sb.PID = Failed, reason+", but not all of it could be removed", time.Now(), 0
	})
	s.freeName(info)
	if err := s.journal(ctx, info); err != nil {
		s.cfg.Log("record the end of %s: %v", info.ID, err)
	}
}

// alive tells whether e has a machine that has not ended.
func (e *entry) alive() bool {
	if e.machine == nil {
		return false
	}
	select {
	case <-e.machine.Done():
		return false
	default:
		return true
	}
}
