package sandbox

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/snapshot"
)

// AutoCheckpoint is the schedule of a sandbox's automatic checkpoints: one is made
// every so often, if the sandbox did something since the last, and the newest Keep
// of them stay. Those made by hand are never touched. The schedule survives restarts
// and rollbacks and ends with the sandbox.
type AutoCheckpoint struct {
	Every time.Duration `json:"every"` // 0 means no schedule
	Keep  int           `json:"keep"`
}

// Bounds and default of a schedule.
const (
	minAutoEvery    = time.Second
	maxAutoEvery    = 24 * time.Hour
	maxAutoKeep     = 1000
	DefaultAutoKeep = 20
)

// labelAuto marks automatic checkpoints.
const labelAuto = "forkd.auto"

// autoTimeout bounds one automatic checkpoint.
const autoTimeout = 5 * time.Minute

// idleCPUPercent is how much of a processor an idle guest may use: its timers and
// its agent. More counts as doing something.
const idleCPUPercent = 5

func (a AutoCheckpoint) check() error {
	switch {
	case a == AutoCheckpoint{}:
		return nil
	case a.Every < minAutoEvery || a.Every > maxAutoEvery:
		return errdefs.New(errdefs.ErrInvalid, "automatic checkpoints every %v: %v to %v are possible", a.Every, minAutoEvery, maxAutoEvery)
	case a.Keep < 1 || a.Keep > maxAutoKeep:
		return errdefs.New(errdefs.ErrInvalid, "cannot keep %d automatic checkpoints: 1 to %d are possible", a.Keep, maxAutoKeep)
	}
	return nil
}

// autoState is where a schedule stands. It is not journaled: a restarted daemon
// begins a new interval.
type autoState struct {
	due  time.Time // of the next look; zero before the first
	busy bool
	last time.Time     // when the last automatic checkpoint was taken
	cpu  time.Duration // what the machine had used then
}

// ScheduleCheckpoints sets the schedule of a sandbox; the zero schedule ends it.
func (s *Service) ScheduleCheckpoints(ctx context.Context, ref string, a AutoCheckpoint) (Sandbox, error) {
	if a.Every != 0 {
		a.Keep = cmp.Or(a.Keep, DefaultAutoKeep)
	}
	if err := a.check(); err != nil {
		return Sandbox{}, err
	}
	e, err := s.resolve(ref)
	if err != nil {
		return Sandbox{}, err
	}
	var before AutoCheckpoint
	info := e.update(func(sb *Sandbox) {
		if before = sb.Auto; sb.State.living() || sb.State == Lost {
			sb.Auto = a
		}
	})
	if info.Auto != a {
		return Sandbox{}, errdefs.New(errdefs.ErrConflict, "sandbox %s has ended: %s", info.ID, info.Reason)
	}
	if err := s.journal(ctx, info); err != nil {
		e.update(func(sb *Sandbox) { sb.Auto = before })
		return Sandbox{}, err
	}
	e.reschedule()
	return info, nil
}

// reschedule begins a new interval.
func (e *entry) reschedule() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.auto.due = time.Time{}
}

// autoTick is how often schedules are looked at.
const autoTick = 250 * time.Millisecond

// keepSchedules makes automatic checkpoints until ctx ends.
func (s *Service) keepSchedules(ctx context.Context) {
	tick := time.NewTicker(autoTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, e := range s.dueAt(now) {
				s.group.Go(func() { s.autoCheckpoint(ctx, e, now) })
			}
		}
	}
}

// dueAt lists the sandboxes whose interval is over at now, and begins the next.
func (s *Service) dueAt(now time.Time) []*entry {
	return slices.DeleteFunc(s.known(), func(e *entry) bool { return !e.autoDue(now) })
}

func (e *entry) autoDue(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	every := e.info.Auto.Every
	if every == 0 || e.auto.busy || e.info.State != Running {
		return false
	}
	first := e.auto.due.IsZero()
	if !first && now.Before(e.auto.due) {
		return false
	}
	e.auto.due = now.Add(every)
	e.auto.busy = !first
	return !first
}

// autoCheckpoint makes one automatic checkpoint and drops those that are too many.
// A failure is logged: the next interval tries again.
func (s *Service) autoCheckpoint(ctx context.Context, e *entry, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, autoTimeout)
	defer cancel()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.auto.busy = false
	}()
	info := e.snapshot()
	if !s.didSomething(ctx, e, now) {
		return
	}
	_, err := s.captureRunning(ctx, e, taking{
		id: ident.New(ident.Checkpoint), mode: ModeLive, wait: true, freeze: true, sync: true, alone: true,
		kind: labelCheckpointOf, labels: map[string]string{labelAuto: "true"},
	})
	if errors.Is(err, errdefs.ErrConflict) || ctx.Err() != nil {
		return // it ends, or another capture is under way, which serves as well
	}
	if err != nil {
		s.cfg.Log("automatic checkpoint of %s: %v", info.ID, err)
		return
	}
	e.noteAuto(ctx, now)
	s.pruneAuto(ctx, info.ID, info.Auto.Keep)
}

// didSomething tells whether a sandbox was asked for anything, or used a processor,
// since its last automatic checkpoint.
func (s *Service) didSomething(ctx context.Context, e *entry, now time.Time) bool {
	e.mu.Lock()
	last, used, before := e.auto.last, e.used, e.auto.cpu
	e.mu.Unlock()
	if last.IsZero() || used.After(last) {
		return true
	}
	u, err := e.machine.Usage(ctx)
	if err != nil {
		return false // it has ended
	}
	return u.CPU-before > now.Sub(last)*idleCPUPercent/100
}

// noteAuto notes where the sandbox stands after an automatic checkpoint.
func (e *entry) noteAuto(ctx context.Context, at time.Time) {
	u, err := e.machine.Usage(ctx)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.auto.last = at
	if err == nil {
		e.auto.cpu = u.CPU
	}
}

// pruneAuto keeps the newest automatic checkpoints of a sandbox. What is in use, or
// what others were made from, stays until it is not.
func (s *Service) pruneAuto(ctx context.Context, sandboxID string, keep int) {
	all := slices.DeleteFunc(s.checkpointsOf(sandboxID), func(m snapshot.Manifest) bool { return m.Labels[labelAuto] == "" })
	for _, m := range all[:max(len(all)-keep, 0)] {
		if len(s.cfg.Store.Holders(m.ID)) > 0 || len(s.cfg.Store.Dependents(m.ID)) > 0 {
			continue
		}
		if err := s.removeSnapshot(ctx, m.ID); err != nil && !errors.Is(err, errdefs.ErrConflict) {
			s.cfg.Log("drop automatic checkpoint %s: %v", m.ID, err)
		}
	}
}
