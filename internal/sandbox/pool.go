package sandbox

import (
	"slices"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/ident"
)

// maxPools is how many snapshots have prepared processes at a time.
const maxPools = 4

// keepPool keeps prepared processes for the snapshots used last.
func (s *Service) keepPool(p *plan) {
	pooler, ok := s.cfg.Engine.(engine.Pooler)
	if !ok {
		return
	}
	s.mu.Lock()
	size := s.blankSizeLocked(p.id)
	if s.closed || size == 0 {
		s.mu.Unlock()
		return
	}
	s.pools = slices.DeleteFunc(s.pools, func(q *plan) bool { return q.id == p.id })
	s.pools = append(s.pools, p)
	var dropped []*plan
	for len(s.pools) > maxPools {
		dropped, s.pools = append(dropped, s.pools[0]), s.pools[1:]
	}
	s.mu.Unlock()
	for _, q := range dropped {
		pooler.Prepare(q.chain, 0, nil)
		s.discardPrepared(q.id)
	}
	if missing := size - pooler.Pooled(p.id); missing > 0 && s.affords(missing) {
		pooler.Prepare(p.chain, size, func() (engine.Spec, error) { return s.preparedSpec(p) })
	}
}

// affords tells whether there is room for n blank machines beside what is admitted.
func (s *Service) affords(n int) bool {
	mem, err := s.readMemory()
	if err != nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.queue) == 0 && mem.roomMiB() >= n*blankMiB+s.reservedMiB
}

// claimableMiB is what the machines occupy that d will claim.
func (s *Service) claimableMiB(d demand) int {
	if d.snapshot == "" {
		return 0
	}
	warm := min(s.warm.ready(d.snapshot), d.n)
	mib := warm * d.each()
	if pooler, ok := s.cfg.Engine.(engine.Pooler); ok {
		mib += min(pooler.Pooled(d.snapshot), d.n-warm) * blankMiB
	}
	return mib
}

// yieldBlank ends the blank machines of other snapshots than keep, to make room. It
// reports whether there were any.
func (s *Service) yieldBlank(keep string) bool {
	pooler, ok := s.cfg.Engine.(engine.Pooler)
	if !ok {
		return false
	}
	s.mu.Lock()
	var gone []*plan
	s.pools = slices.DeleteFunc(s.pools, func(p *plan) bool {
		if p.id != keep {
			gone = append(gone, p)
		}
		return p.id != keep
	})
	s.mu.Unlock()
	any := false
	for _, p := range gone {
		any = any || pooler.Pooled(p.id) > 0
		pooler.Prepare(p.chain, 0, nil)
		s.discardPrepared(p.id)
	}
	return any
}

// preparedSpec is the spec of a machine for the pool. Its directory is ours until it
// is claimed, and we remove it with the pool.
func (s *Service) preparedSpec(p *plan) (engine.Spec, error) {
	id := ident.New(ident.Sandbox)
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return engine.Spec{}, errClosed()
	}
	s.prepared[id] = p.id
	s.mu.Unlock()
	return s.newSpec(id, p.manifest.Shape, p.root, 0)
}

// claim takes a prepared machine of a snapshot: a warm one with its agent, else one
// of the engine's pool, else nil.
func (s *Service) claim(snapshotID string) (engine.Machine, *link) {
	m, ok, dead := s.warm.take(snapshotID)
	s.endWarm(dead)
	if ok {
		return m.machine, m.link
	}
	p, ok := s.cfg.Engine.(engine.Pooler)
	if !ok {
		return nil, nil
	}
	for blank := p.Claim(snapshotID); blank != nil; blank = p.Claim(snapshotID) {
		if s.takePrepared(blank.ID()) {
			return blank, nil
		}
		// It came up while its pool was ended, which took its directory.
		if err := s.discard(blank.ID()); err != nil {
			s.cfg.Log("%v", err)
		}
	}
	return nil, nil
}

// takePrepared tells whether a prepared machine is whole, and hands it over.
func (s *Service) takePrepared(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, whole := s.prepared[id]
	delete(s.prepared, id)
	return whole
}

// poolOf tells which pool c was claimed from.
func poolOf(c *child) PoolKind {
	switch {
	case c.link != nil:
		return PoolWarm
	case c.machine != nil:
		return PoolBlank
	}
	return PoolNone
}

// forgetPool ends the prepared processes of a snapshot.
func (s *Service) forgetPool(id string) {
	s.mu.Lock()
	s.pools = slices.DeleteFunc(s.pools, func(q *plan) bool { return q.id == id })
	delete(s.blank, id)
	s.mu.Unlock()
	s.dropWarm(id)
	s.dropSpares(id)
	s.cfg.Engine.Forget(id)
	s.discardPrepared(id)
}

// dropPools ends all prepared processes.
func (s *Service) dropPools() {
	s.mu.Lock()
	pools := s.pools
	s.pools = nil
	s.mu.Unlock()
	for _, p := range pools {
		if pooler, ok := s.cfg.Engine.(engine.Pooler); ok {
			pooler.Prepare(p.chain, 0, nil)
		}
		s.discardPrepared(p.id)
	}
}

// discardPrepared removes what is left of prepared machines of a snapshot, after the
// engine was told to end them.
func (s *Service) discardPrepared(snapshotID string) {
	s.mu.Lock()
	var ids []string
	for id, of := range s.prepared {
		if of == snapshotID {
			ids = append(ids, id)
			delete(s.prepared, id)
		}
	}
	s.mu.Unlock()
	for _, id := range ids {
		if err := s.discard(id); err != nil {
			s.cfg.Log("%v", err)
		}
	}
}
