package sandbox

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/ident"
)

// A spare is a machine that stands restored from the checkpoint to which its sandbox
// is most likely rolled back: the latest that it made or returned to. A rollback there
// claims it and has only to resume it. The one that proved a checkpoint becomes its
// spare; after a rollback the next one is made in the background. A sandbox has one at
// most, all sandboxes together maxSpares, and none is kept where nothing is prepared
// (Config.PoolSize) or memory is short: they give way to sandboxes.
//
// Where the capture froze all that could run, a spare has answered HELLO before it was
// stopped again: that is half of what a rollback waits for otherwise. No process of the
// user has run in it, and it has no identity: its agent waits for the verdict. Its
// directory is removed with it; what a crash leaves is a machine without a row, which the
// next start ends.
type spare struct {
	sandboxID  string
	checkpoint string
	hurry      chan struct{} // closed when somebody waits for it
	made       chan struct{} // closed when machine is final

	machine engine.Machine // nil if it could not be made; final once made is closed
	link    *link          // likewise; nil unless the machine has answered
	dropped bool           // guarded by spares.mu: who makes it ends it
}

// maxSpares bounds the spares of all sandboxes.
const maxSpares = 8

// spareQuiet is how long after a rollback its sandbox has the processors to itself: it
// is asked for something now, and the first answer of an emulated guest takes 40 to 60 ms.
const spareQuiet = 90 * time.Millisecond

// spares holds the spares, the one used longest ago first.
type spares struct {
	mu sync.Mutex
	// +checklocks:mu
	all []*spare
	// +checklocks:mu
	ended bool
}

// put makes sp the spare of its sandbox and returns those that have to go for it.
func (p *spares) put(sp *spare) (gone []*spare) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return []*spare{sp}
	}
	p.all, gone = cut(p.all, func(o *spare) bool { return o.sandboxID == sp.sandboxID })
	p.all = append(p.all, sp)
	if n := len(p.all) - maxSpares; n > 0 {
		gone = append(gone, p.all[:n]...)
		p.all = slices.Clone(p.all[n:])
	}
	return gone
}

// cut splits all by what is to go.
func cut(all []*spare, goes func(*spare) bool) (stay, gone []*spare) {
	for _, sp := range all {
		if goes(sp) {
			gone = append(gone, sp)
		} else {
			stay = append(stay, sp)
		}
	}
	return stay, gone
}

// take hands out the spare of a sandbox, if it is of that checkpoint.
func (p *spares) take(sandboxID, checkpoint string) *spare {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.IndexFunc(p.all, func(sp *spare) bool { return sp.sandboxID == sandboxID && sp.checkpoint == checkpoint })
	if i < 0 {
		return nil
	}
	sp := p.all[i]
	p.all = slices.Delete(p.all, i, i+1)
	close(sp.hurry)
	return sp
}

// remove takes out what is to go.
func (p *spares) remove(goes func(*spare) bool) (gone []*spare) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all, gone = cut(p.all, goes)
	return gone
}

// shut takes all out and takes no more.
func (p *spares) shut() []*spare {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.all
	p.all, p.ended = nil, true
	return all
}

// count is how many spares of a checkpoint there are.
func (p *spares) count(checkpoint string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, sp := range p.all {
		if sp.checkpoint == checkpoint {
			n++
		}
	}
	return n
}

// endSpares ends machines that were taken out. One that is still being made is ended
// by who makes it.
func (s *Service) endSpares(gone []*spare) {
	for _, sp := range gone {
		s.spares.mu.Lock()
		sp.dropped = true
		s.spares.mu.Unlock()
		select {
		case <-sp.made:
			s.endSpare(sp)
		default:
		}
	}
}

func (s *Service) endSpare(sp *spare) {
	if sp.link != nil {
		sp.link.close()
	}
	if sp.machine == nil {
		return
	}
	if err := s.discard(sp.machine.ID()); err != nil {
		s.cfg.Log("%v", err)
	}
}

// dropSpares ends the spares of a checkpoint that is being deleted.
func (s *Service) dropSpares(checkpoint string) {
	s.endSpares(s.spares.remove(func(sp *spare) bool { return sp.checkpoint == checkpoint }))
}

// dropSpareOf ends the spare of a sandbox that has ended for good.
func (s *Service) dropSpareOf(sandboxID string) {
	s.endSpares(s.spares.remove(func(sp *spare) bool { return sp.sandboxID == sandboxID }))
}

// yieldSpares ends all spares, to make room. It reports whether there were any.
func (s *Service) yieldSpares() bool {
	gone := s.spares.remove(func(*spare) bool { return true })
	s.endSpares(gone)
	return len(gone) > 0
}

// wantsSpare tells whether the sandbox of e may have one.
func (s *Service) wantsSpare(e *entry) bool {
	return s.cfg.PoolSize > 0 && e.alive() && s.affords(1)
}

// claimSpare hands out the spare of a sandbox if it is of that checkpoint, waiting for
// one that is being made: that is further than a new one would be. It returns nil if
// there is none.
func (s *Service) claimSpare(ctx context.Context, sandboxID, checkpoint string) (engine.Machine, *link) {
	sp := s.spares.take(sandboxID, checkpoint)
	if sp == nil {
		return nil, nil
	}
	select {
	case <-sp.made:
	case <-ctx.Done():
		s.endSpares([]*spare{sp})
		return nil, nil
	}
	if sp.machine == nil {
		return nil, nil
	}
	select {
	case <-sp.machine.Done(): // it died while it waited
		s.endSpare(sp)
		return nil, nil
	default:
		return sp.machine, sp.link
	}
}

// keepSpare takes a machine that stands restored from a checkpoint of e as its spare.
// quiet: nothing of the user runs in it before it has its verdict.
func (s *Service) keepSpare(e *entry, checkpoint string, m engine.Machine, quiet bool) {
	s.startSpare(e, checkpoint, func(ctx context.Context, sp *spare) error {
		sp.machine = m
		if !quiet {
			return nil
		}
		return s.rehearseSpare(ctx, sp)
	})
}

// renewSpare makes a spare of a checkpoint for e, in the background.
func (s *Service) renewSpare(e *entry, checkpoint string) {
	if s.cfg.PoolSize > 0 {
		s.startSpare(e, checkpoint, func(ctx context.Context, sp *spare) error { return s.makeSpare(ctx, e, sp) })
	}
}

// startSpare has fill make the machine of a new spare of e, in the background.
func (s *Service) startSpare(e *entry, checkpoint string, fill func(context.Context, *spare) error) {
	sp := &spare{sandboxID: e.snapshot().ID, checkpoint: checkpoint, hurry: make(chan struct{}), made: make(chan struct{})}
	s.endSpares(s.spares.put(sp))
	s.group.Go(func() {
		if err := fill(s.closing, sp); err != nil {
			if s.closing.Err() == nil {
				s.cfg.Log("prepare a rollback of %s: %v", sp.sandboxID, err)
			}
			s.endSpare(sp)
			sp.machine, sp.link = nil, nil
		}
		s.spares.mu.Lock()
		close(sp.made)
		dropped := sp.dropped
		s.spares.mu.Unlock()
		if dropped {
			s.endSpare(sp)
		}
	})
}

// rehearseSpare has the machine of sp answer, and stops it where it waits for its
// verdict. Who waits for it already is not kept waiting for that.
func (s *Service) rehearseSpare(ctx context.Context, sp *spare) error {
	select {
	case <-sp.hurry:
		return nil
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	sp.link = newLink(sp.machine, s.cfg.Connect, helloTimeout)
	if err := sp.machine.Resume(ctx); err != nil {
		return err
	}
	agent, err := sp.link.get(ctx)
	if err != nil {
		return err
	}
	if _, err := agent.Ping(ctx); err != nil {
		return err
	}
	return sp.machine.Pause(ctx)
}

// makeSpare restores a machine once the sandbox had its time, or somebody waits.
func (s *Service) makeSpare(ctx context.Context, e *entry, sp *spare) error {
	quiet := time.NewTimer(spareQuiet)
	defer quiet.Stop()
	select {
	case <-quiet.C:
	case <-sp.hurry:
	case <-ctx.Done():
		return ctx.Err()
	}
	s.spares.mu.Lock()
	dropped := sp.dropped
	s.spares.mu.Unlock()
	if dropped || !s.wantsSpare(e) {
		return nil
	}
	p, err := s.planOf(ctx, sp.checkpoint)
	if err != nil {
		return err
	}
	defer p.release()
	sp.machine, err = s.restoreStopped(ctx, stopped{chain: p.chain, shape: p.manifest.Shape, root: p.root, limits: limitsOf(e.snapshot())})
	if err != nil || !p.manifest.Agent.RunnerQuiet {
		return err
	}
	return s.rehearseSpare(ctx, sp)
}

// stopped is a machine that is to be restored and not to run.
type stopped struct {
	chain  []engine.State
	shape  engine.Shape
	root   engine.Root
	limits engine.Limits
}

// restoreStopped makes a machine in a directory of its own, which goes with discard.
func (s *Service) restoreStopped(ctx context.Context, w stopped) (engine.Machine, error) {
	id := ident.New(ident.Sandbox)
	spec, err := s.newSpec(id, w.shape, w.root, 0)
	if err != nil {
		return nil, err
	}
	spec.Limits = w.limits
	machine, err := s.cfg.Engine.Restore(ctx, spec, w.chain)
	if err != nil {
		return nil, errors.Join(err, s.discard(id))
	}
	return machine, nil
}
