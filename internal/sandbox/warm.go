package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// The warm pool. A warm machine has gone the whole way from restore to a first
// answer with a throw-away identity, was prepared and committed as for a capture,
// and stands stopped: its agent waits for a verdict. A claim resumes it and gives
// the verdict "fork" with the real identity, so everything the fork contract
// makes unique is made unique again, before any user code runs. What is saved is
// the translation of the guest's code, by far the largest part of a fork under
// emulation.
//
// A snapshot whose runner has threads or child processes is never warmed: they
// would have run during the rehearsal.

// MaxWarm bounds the warm machines of one snapshot.
const MaxWarm = 500

// WarmPool is a warm pool as callers see it.
type WarmPool struct {
	SnapshotID string
	Tags       []string
	Want       int
	Ready      int
	Reason     string // why it is not being filled, or ""
	Blank      int    // how many blank machines are kept once it is forked
	BlankReady int
}

type warmMachine struct {
	machine engine.Machine
	link    *link
}

type warmTarget struct {
	want   int
	ready  []warmMachine
	reason string // of the last failure; it is not filled until it is set again
	full   string // why there was no room; it is filled on when there may be some
}

// warmPools holds the warm machines. One worker fills them while no fork is under way.
type warmPools struct {
	wake chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	targets map[string]*warmTarget
	// +checklocks:mu
	busy int // forks under way
	// +checklocks:mu
	ended bool
}

// warmQuiet is how long no fork may have been under way before warm machines are
// made: making one takes as much CPU as a cold fork.
const warmQuiet = 500 * time.Millisecond

// warmAgain is how often pools that had no room, or whose machines died, are looked at.
const warmAgain = 10 * time.Second

// SetWarmPool keeps n warm machines of a snapshot ready; 0 ends them.
func (s *Service) SetWarmPool(ctx context.Context, ref string, n int) (WarmPool, error) {
	if n < 0 || n > MaxWarm {
		return WarmPool{}, errdefs.New(errdefs.ErrInvalid, "cannot keep %d warm machines: 0 to %d are possible", n, MaxWarm)
	}
	p, err := s.plan(ctx, Fork{Snapshot: ref})
	if err != nil {
		return WarmPool{}, err
	}
	defer p.release()
	if n > 0 && !p.manifest.Agent.RunnerQuiet {
		return WarmPool{}, errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "snapshot %s cannot be warmed: its runner had threads or child processes when it was captured", p.name()),
			"they would run before the fork is asked for; fork it without a warm pool")
	}
	if s.cfg.Session == "" {
		if err := s.cfg.Journal.SetWarmPool(ctx, p.id, n); err != nil {
			return WarmPool{}, err
		}
	}
	s.warm.set(p.id, n)
	s.dropSurplus(p.id)
	s.warm.kick()
	return s.warmPool(ctx, p.id)
}

// recoverWarm takes up the pools that an earlier daemon kept. A private daemon
// keeps none: it is gone before one is filled.
func (s *Service) recoverWarm(ctx context.Context) error {
	if s.cfg.Session != "" {
		return nil
	}
	pools, err := s.cfg.Journal.WarmPools(ctx)
	if err != nil {
		return fmt.Errorf("recover warm pools: %w", err)
	}
	for id, want := range pools {
		s.warm.set(id, min(want, MaxWarm))
	}
	return nil
}

// WarmPools lists the warm pools.
func (s *Service) WarmPools(ctx context.Context) ([]WarmPool, error) {
	s.warm.mu.Lock()
	ids := make([]string, 0, len(s.warm.targets))
	for id := range s.warm.targets {
		ids = append(ids, id)
	}
	s.warm.mu.Unlock()
	ids = s.withBlank(ids)
	slices.Sort(ids)
	out := make([]WarmPool, 0, len(ids))
	for _, id := range ids {
		one, err := s.warmPool(ctx, id)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

func (s *Service) warmPool(ctx context.Context, id string) (WarmPool, error) {
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return WarmPool{}, err
	}
	s.endWarm(s.warm.prune())
	out := WarmPool{SnapshotID: id, Tags: tags[id]}
	out.Blank, out.BlankReady = s.blankPool(id)
	s.warm.mu.Lock()
	defer s.warm.mu.Unlock()
	if t := s.warm.targets[id]; t != nil {
		out.Want, out.Ready, out.Reason = t.want, len(t.ready), cmp.Or(t.reason, t.full)
	}
	return out, nil
}

func (w *warmPools) init() {
	w.wake = make(chan struct{}, 1)
	w.targets = map[string]*warmTarget{}
}

func (w *warmPools) set(id string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.targets[id]
	if t == nil {
		if n == 0 {
			return
		}
		t = &warmTarget{}
		w.targets[id] = t
	}
	t.want, t.reason, t.full = n, "", ""
}

func (w *warmPools) kick() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// enter and leave count forks under way; the worker rests meanwhile.
func (w *warmPools) enter() { w.count(1) }
func (w *warmPools) leave() { w.count(-1) }

func (w *warmPools) count(delta int) {
	w.mu.Lock()
	w.busy += delta
	w.mu.Unlock()
	w.kick()
}

// roomCame has the worker look again at pools that had no room.
func (w *warmPools) roomCame() {
	w.mu.Lock()
	for _, t := range w.targets {
		t.full = ""
	}
	w.mu.Unlock()
	w.kick()
}

// ready counts the warm machines of a snapshot.
func (w *warmPools) ready(id string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t := w.targets[id]; t != nil {
		return len(t.ready)
	}
	return 0
}

// prune takes the machines out that died while they waited.
func (w *warmPools) prune() []warmMachine {
	w.mu.Lock()
	defer w.mu.Unlock()
	var dead []warmMachine
	for _, t := range w.targets {
		t.ready = slices.DeleteFunc(t.ready, func(m warmMachine) bool {
			select {
			case <-m.machine.Done():
				dead = append(dead, m)
				return true
			default:
				return false
			}
		})
	}
	return dead
}

// take hands out a warm machine of a snapshot, and those that died while they waited.
func (w *warmPools) take(id string) (m warmMachine, ok bool, dead []warmMachine) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.targets[id]
	for t != nil && len(t.ready) > 0 {
		m, t.ready = t.ready[0], t.ready[1:]
		select {
		case <-m.machine.Done():
			dead = append(dead, m)
		default:
			return m, true, dead
		}
	}
	return warmMachine{}, false, dead
}

// surplus takes out the machines above what is wanted of a snapshot.
func (w *warmPools) surplus(id string) []warmMachine {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.targets[id]
	if t == nil {
		return nil
	}
	var out []warmMachine
	if len(t.ready) > t.want {
		out = slices.Clone(t.ready[t.want:])
		t.ready = t.ready[:t.want]
	}
	if t.want == 0 {
		delete(w.targets, id)
	}
	return out
}

// yield takes up to n machines out, of any snapshot but keep.
func (w *warmPools) yield(n int, keep string) []warmMachine {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []warmMachine
	for id, t := range w.targets {
		if id == keep {
			continue
		}
		k := min(n-len(out), len(t.ready))
		out = append(out, t.ready[:k]...)
		t.ready = slices.Clone(t.ready[k:])
		if k > 0 {
			t.full = "it made room for forks"
		}
	}
	return out
}

func (s *Service) dropSurplus(id string) { s.endWarm(s.warm.surplus(id)) }

// yieldWarm ends up to n warm machines of other snapshots than keep, to make room.
// It reports whether it did.
func (s *Service) yieldWarm(n int, keep string) bool {
	machines := s.warm.yield(max(n, 0), keep)
	s.endWarm(machines)
	return len(machines) > 0
}

func (s *Service) endWarm(machines []warmMachine) {
	for _, m := range machines {
		m.link.close()
		if err := s.discard(m.machine.ID()); err != nil {
			s.cfg.Log("%v", err)
		}
	}
}

// dropWarm ends the pool of a snapshot.
func (s *Service) dropWarm(id string) {
	s.warm.set(id, 0)
	s.dropSurplus(id)
}

// fillWarm is the worker.
func (s *Service) fillWarm(ctx context.Context) {
	quiet := time.NewTimer(warmQuiet)
	defer quiet.Stop()
	// Memory that other programs give back is announced by nobody.
	again := time.NewTicker(warmAgain)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			s.endWarm(s.warm.shut())
			return
		case <-s.warm.wake:
			quiet.Reset(warmQuiet)
			continue
		case <-again.C:
			s.endWarm(s.warm.prune())
			s.warm.roomCame()
			continue
		case <-quiet.C:
		}
		for id := s.warm.needy(); id != "" && ctx.Err() == nil; id = s.warm.needy() {
			s.addWarm(ctx, id)
		}
	}
}

func (w *warmPools) shut() []warmMachine {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	var all []warmMachine
	for _, t := range w.targets {
		all = append(all, t.ready...)
	}
	clear(w.targets)
	return all
}

// needy returns a snapshot that wants more warm machines, or "".
func (w *warmPools) needy() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.busy > 0 {
		return ""
	}
	for id, t := range w.targets {
		if len(t.ready) < t.want && t.reason == "" && t.full == "" {
			return id
		}
	}
	return ""
}

// addWarm makes one warm machine of a snapshot.
func (s *Service) addWarm(ctx context.Context, id string) {
	m, err := s.makeWarm(ctx, id)
	s.warm.mu.Lock()
	t := s.warm.targets[id]
	kept := err == nil && t != nil && !s.warm.ended && len(t.ready) < t.want
	if kept {
		t.ready = append(t.ready, m)
	}
	full := errors.Is(err, errdefs.ErrResourceExhausted)
	switch {
	case err == nil || t == nil || ctx.Err() != nil:
	case full:
		t.full = err.Error()
	default:
		t.reason = err.Error()
	}
	s.warm.mu.Unlock()
	if err != nil && !full && ctx.Err() == nil {
		s.cfg.Log("warm a machine of %s: %v", id, err)
	}
	if err == nil && !kept {
		s.endWarm([]warmMachine{m})
	}
}

// makeWarm restores a machine and rehearses a claim with it.
func (s *Service) makeWarm(ctx context.Context, snapshotID string) (_ warmMachine, err error) {
	p, err := s.planOf(ctx, snapshotID)
	if err != nil {
		return warmMachine{}, err
	}
	defer p.release()
	room, err := s.admit(ctx, demand{what: "warm", n: 1, eachMiB: p.reserveMiB(ctx), refill: true})
	if err != nil {
		return warmMachine{}, err
	}
	defer room.release()
	id := ident.New(ident.Sandbox)
	spec, err := s.newSpec(id, p.manifest.Shape, p.root, 0)
	if err != nil {
		return warmMachine{}, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.discard(id))
		}
	}()
	machine, err := s.cfg.Engine.Restore(ctx, spec, p.chain)
	if err != nil {
		return warmMachine{}, err
	}
	m := warmMachine{machine: machine, link: newLink(machine, s.cfg.Connect, helloTimeout)}
	if err := m.rehearse(ctx, len(p.manifest.Agent.WarmLanguages) > 0); err != nil {
		m.link.close()
		return warmMachine{}, err
	}
	return m, nil
}

// rehearse goes the way of a claim and of the first eval, and stops
// the machine where a claim will find it.
func (m warmMachine) rehearse(ctx context.Context, runner bool) error {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	if err := m.machine.Resume(ctx); err != nil {
		return err
	}
	agent, err := m.link.get(ctx)
	if err != nil {
		return err
	}
	id := newIdentity(m.machine.ID(), strings.Repeat("x", len(m.machine.ID())), nil)
	if _, err := agent.VerdictFork(ctx, id); err != nil {
		return fmt.Errorf("rehearse the identity: %w", err)
	}
	if err := firstCalls(ctx, agent, runner); err != nil {
		return err
	}
	if err := agent.Prepare(ctx, agentwire.Prepare{Known: true}); err != nil {
		return fmt.Errorf("freeze the rehearsed machine: %w", err)
	}
	if err := agent.Commit(ctx); err != nil {
		return fmt.Errorf("freeze the rehearsed machine: %w", err)
	}
	return m.machine.Pause(ctx)
}

// firstCalls runs what a sandbox is asked first. The code leaves nothing behind.
// No exec: starting a program translates so much of the guest that a machine which
// may never be asked for one would own a third more memory.
func firstCalls(ctx context.Context, agent Agent, runner bool) error {
	if !runner {
		return nil
	}
	if _, err := agent.Eval(ctx, agentwire.EvalRequest{Code: "None"}); err != nil {
		return fmt.Errorf("rehearse an eval: %w", err)
	}
	return nil
}
