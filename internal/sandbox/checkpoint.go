package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/snapshot"
)

// A checkpoint is a snapshot that belongs to one sandbox: rollback returns the
// sandbox to it, under the same id, and it can be forked like any other. It goes
// with its sandbox, unless others were made from it.

// maxLabelText bounds what a checkpoint is called.
const maxLabelText = 256

// Checkpoint asks for a checkpoint of a running sandbox.
type Checkpoint struct {
	Label    string // free text
	Sync     bool   // wait until it is written
	NoFreeze bool
}

// Checkpoint captures a running sandbox so that it can return there. The call
// returns when the sandbox runs again, unless c.Sync. A capture under way is waited
// for, so that checkpoints can follow one another closely.
func (s *Service) Checkpoint(ctx context.Context, ref string, c Checkpoint) (Branched, error) {
	e, err := s.resolve(ref)
	if err != nil {
		return Branched{}, err
	}
	labels := map[string]string{}
	if c.Label != "" {
		labels[labelText] = c.Label
	}
	if len(c.Label) > maxLabelText {
		return Branched{}, errdefs.New(errdefs.ErrInvalid, "a label of %d bytes is longer than %d", len(c.Label), maxLabelText)
	}
	if err := e.left(ctx, Capturing); err != nil {
		return Branched{}, err
	}
	return s.captureRunning(ctx, e, taking{
		id: ident.New(ident.Checkpoint), labels: labels, mode: ModeLive,
		wait: c.Sync, freeze: !c.NoFreeze, sync: !c.NoFreeze, kind: labelCheckpointOf,
	})
}

// Checkpoints lists the checkpoints of a sandbox, oldest first.
func (s *Service) Checkpoints(ctx context.Context, ref string) ([]Snapshot, error) {
	e, err := s.resolve(ref)
	if err != nil {
		return nil, err
	}
	var out []Snapshot
	for _, m := range s.checkpointsOf(e.snapshot().ID) {
		out = append(out, s.describe(ctx, m, nil))
	}
	return out, nil
}

func (s *Service) checkpointsOf(sandboxID string) []snapshot.Manifest {
	all := slices.DeleteFunc(s.cfg.Store.List(), func(m snapshot.Manifest) bool {
		return m.Labels[labelCheckpointOf] != sandboxID
	})
	slices.SortFunc(all, func(a, b snapshot.Manifest) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all
}

// lose notes that the machine of a sandbox ended by itself. With a checkpoint the
// sandbox can come back: then it keeps its name and does not count as ended.
func (s *Service) lose(sb *Sandbox, reason string) {
	sb.Reason, sb.PID = reason, 0
	if len(s.checkpointsOf(sb.ID)) > 0 {
		sb.State = Lost
		return
	}
	sb.State, sb.EndedAt = Failed, time.Now()
}

// dropCheckpoints deletes the checkpoints of a sandbox that is gone, newest first.
// What others use stays until they are gone, too.
func (s *Service) dropCheckpoints(sandboxID string) {
	for _, m := range slices.Backward(s.checkpointsOf(sandboxID)) {
		s.collect(m.ID)
	}
}

// RolledBack is the outcome of a rollback.
type RolledBack struct {
	Sandbox      Sandbox
	CheckpointID string
	Duration     time.Duration // from the request to a machine that has answered
}

// Rollback returns a sandbox to one of its checkpoints, "" being the latest: same
// id, name, token and hostname; memory, CPU and disk as they were. A new machine is
// restored and verified before the old one ends, so that if anything fails the
// sandbox goes on as it is. A lost sandbox comes back to life. A capture under way
// is waited for.
func (s *Service) Rollback(ctx context.Context, ref, to string) (RolledBack, error) {
	began := time.Now()
	e, err := s.resolve(ref)
	if err != nil {
		return RolledBack{}, err
	}
	id := e.snapshot().ID
	if err := e.left(ctx, Capturing); err != nil {
		return RolledBack{}, err
	}
	checkpoint, err := s.checkpointFor(ctx, id, to)
	if err != nil {
		return RolledBack{}, err
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return RolledBack{}, err
	}
	defer done()
	before, err := e.enterRollback()
	if err != nil {
		return RolledBack{}, err
	}
	r := &rollback{s: s, old: e, before: before}
	next, err := r.run(ctx, checkpoint)
	if err != nil {
		e.update(func(sb *Sandbox) {
			if sb.State == RollingBack {
				sb.State = before.State
			}
		})
		return RolledBack{}, fmt.Errorf("roll sandbox %s back to %s: %w", id, checkpoint, err)
	}
	return RolledBack{Sandbox: next.snapshot(), CheckpointID: checkpoint, Duration: time.Since(began)}, nil
}

// checkpointFor finds where a sandbox can return to: a checkpoint by id, unique
// prefix or label, the latest if to is empty, or a branch of the sandbox.
func (s *Service) checkpointFor(ctx context.Context, sandboxID, to string) (string, error) {
	all := s.checkpointsOf(sandboxID)
	if to == "" && len(all) == 0 {
		return "", errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "sandbox %s has no checkpoint", sandboxID), "make one with: forkd checkpoint %s", sandboxID)
	}
	if to == "" {
		return all[len(all)-1].ID, nil
	}
	ids := make([]string, 0, len(all))
	for _, m := range slices.Backward(all) {
		if m.Labels[labelText] == to {
			return m.ID, nil
		}
		ids = append(ids, m.ID)
	}
	id, err := pick(ident.Checkpoint, "checkpoint", to, ids)
	if errors.Is(err, errdefs.ErrNotFound) {
		if branch, ok := s.branchOf(ctx, sandboxID, to); ok {
			return branch, nil
		}
	}
	return id, errdefs.WithHint(err, "list them with: forkd checkpoints %s", sandboxID)
}

// branchOf finds a snapshot that was branched from a sandbox.
func (s *Service) branchOf(ctx context.Context, sandboxID, ref string) (string, bool) {
	id, _, err := s.resolveSnapshot(ctx, ref)
	if err != nil {
		return "", false
	}
	m, err := s.cfg.Store.Get(id)
	return id, err == nil && m.Labels[labelBranchedFrom] == sandboxID
}

// enterRollback puts a running or lost sandbox into the state rolling_back.
func (e *entry) enterRollback() (before Sandbox, err error) {
	e.update(func(sb *Sandbox) {
		before = *sb
		switch sb.State {
		case Running, Lost:
			sb.State = RollingBack
		case Failed:
			err = errdefs.New(errdefs.ErrConflict, "sandbox %s has ended: %s", sb.ID, sb.Reason)
		default:
			err = errdefs.New(errdefs.ErrConflict, "sandbox %s is %s: one capture or rollback at a time", sb.ID, sb.State)
		}
	})
	return before, err
}

// rolledBack is why the machine before a rollback ended.
const rolledBack = "it was rolled back"

// rolledBack tells whether another machine takes or has taken the place of that of e.
func (e *entry) rolledBack() bool {
	info := e.snapshot()
	return info.State == Stopping && info.Reason == rolledBack
}

// settled waits until a rollback has replaced e, or given up.
func (e *entry) settled(ctx context.Context) error {
	return e.wait(ctx, func(sb Sandbox) bool { return sb.replaced || sb.State != Stopping || sb.Reason != rolledBack })
}

// rollback is one rollback under way.
type rollback struct {
	s      *Service
	old    *entry
	before Sandbox
}

// run makes the new machine, swaps it in and ends the old one.
func (r *rollback) run(ctx context.Context, checkpoint string) (*entry, error) {
	p, err := r.s.planOf(ctx, checkpoint)
	if err != nil {
		return nil, err
	}
	defer p.release()
	next, err := r.restore(ctx, p)
	if err != nil {
		return nil, err
	}
	if err := r.swap(ctx, next); err != nil {
		next.link.close()
		next.release()
		return nil, errors.Join(err, r.s.discard(next.snapshot().machine()))
	}
	r.endOld()
	r.s.renewSpare(next, p.id)
	return next, nil
}

// restore makes a machine of the checkpoint that has answered.
func (r *rollback) restore(ctx context.Context, p *plan) (_ *entry, err error) {
	s := r.s
	info := r.before
	machine, l := s.claimSpare(ctx, info.ID, p.id)
	if machine == nil {
		machine, err = s.restoreStopped(ctx, stopped{chain: p.chain, shape: p.manifest.Shape, root: p.root, limits: limitsOf(info)})
		if err != nil {
			return nil, err
		}
	}
	info.machineID, info.restoredID = machine.ID(), p.id
	defer func() {
		if err != nil {
			err = errors.Join(err, s.discard(info.machineID))
		}
	}()
	if l == nil {
		l = newLink(machine, s.cfg.Connect, helloTimeout)
	}
	e := &entry{machine: machine, link: l}
	receipt, err := r.identify(ctx, e)
	if err != nil {
		e.link.close()
		return nil, err
	}
	info.State, info.Reason, info.EndedAt, info.owed = Running, "", time.Time{}, ""
	info.PID, info.Receipt = machine.PID(), &receipt
	e.info = info
	e.release = s.leaseFor(p.id, info.ID)
	return e, nil
}

// identify lets the machine run. It is the same sandbox: only the kernel's random
// generator, the clock and the generation are new.
func (r *rollback) identify(ctx context.Context, e *entry) (agentwire.Receipt, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	if err := e.machine.Resume(ctx); err != nil {
		return agentwire.Receipt{}, err
	}
	agent, err := e.link.get(ctx)
	if err != nil {
		return agentwire.Receipt{}, err
	}
	id := newIdentity(r.before.ID, "", nil)
	id.Keep, id.Reseed = true, agentwire.ReseedSystem
	return agent.VerdictFork(ctx, id)
}

// swap makes next the sandbox. The journal comes first: whichever of the two
// machines it names after a crash is the one that is adopted.
func (r *rollback) swap(ctx context.Context, next *entry) error {
	s := r.s
	info := next.snapshot()
	// From here on the end of the old machine, asked for or not, is ours.
	ended := false
	r.old.update(func(sb *Sandbox) {
		if ended = sb.State != RollingBack; !ended {
			sb.State, sb.Reason = Stopping, rolledBack
		}
	})
	if ended {
		return errdefs.New(errdefs.ErrConflict, "sandbox %s was ended meanwhile", info.ID)
	}
	if err := s.journal(ctx, info); err != nil {
		r.old.update(func(sb *Sandbox) { sb.State, sb.Reason = r.before.State, r.before.Reason })
		if r.before.State == Running && !r.old.alive() {
			s.group.Go(func() { s.watch(r.old) }) // it ended while nobody minded
		}
		return err
	}
	s.register(next)
	r.old.update(func(sb *Sandbox) { sb.replaced = true })
	return nil
}

// endOld ends the machine that was replaced, in the background: nobody can reach it any
// more. What fails is removed at the next start.
func (r *rollback) endOld() {
	s := r.s
	if r.old.link != nil {
		r.old.link.close()
	}
	if r.old.release != nil {
		r.old.release()
	}
	s.ending.Add(1)
	s.group.Go(func() {
		defer s.ending.Done()
		s.collect(r.before.base())
		if err := s.discard(r.before.machine()); err != nil {
			s.cfg.Log("end the machine that a rollback replaced: %v", err)
		}
	})
}
