package sandbox

import (
	"context"
	"slices"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// DefaultBlank as the size of a blank pool stands for the daemon's default.
const DefaultBlank = -1

// blankMiB is what a blank machine occupies: the memory of its program.
const blankMiB = 20

// SetBlankPool keeps n blank machines of a snapshot ready from now on, 0 none, and
// [DefaultBlank] as many as of others. It holds until the daemon ends.
func (s *Service) SetBlankPool(ctx context.Context, ref string, n int) (WarmPool, error) {
	if n < DefaultBlank || n > MaxWarm {
		return WarmPool{}, errdefs.New(errdefs.ErrInvalid, "cannot keep %d blank machines: 0 to %d are possible", n, MaxWarm)
	}
	pooler, ok := s.cfg.Engine.(engine.Pooler)
	if !ok && n > 0 {
		return WarmPool{}, errdefs.New(errdefs.ErrUnsupported, "engine %s keeps no blank machines", s.cfg.Engine.Name())
	}
	p, err := s.plan(ctx, Fork{Snapshot: ref})
	if err != nil {
		return WarmPool{}, err
	}
	defer p.release()
	if ok {
		if err := s.resizeBlank(pooler, p, n); err != nil {
			return WarmPool{}, err
		}
	}
	return s.warmPool(ctx, p.id)
}

func (s *Service) resizeBlank(pooler engine.Pooler, p *plan, n int) error {
	have := pooler.Pooled(p.id)
	if n > have {
		mem, err := s.readMemory()
		if err != nil {
			return err
		}
		if fits := have + max(mem.roomMiB()/blankMiB, 0); n > fits {
			return errdefs.WithHint(errdefs.New(errdefs.ErrResourceExhausted, "cannot keep %d blank machines of %s: %d fit (%s)", n, p.name(), fits, mem.binds()),
				"ask for fewer, or end sandboxes with: forkd kill")
		}
	}
	s.mu.Lock()
	if n == DefaultBlank {
		delete(s.blank, p.id)
	} else {
		s.blank[p.id] = n
	}
	size := s.blankSizeLocked(p.id)
	if size == 0 {
		s.pools = slices.DeleteFunc(s.pools, func(q *plan) bool { return q.id == p.id })
	}
	s.mu.Unlock()
	if size == 0 || size < have {
		// The engine does not tell which ones it ends, so all go, with their directories.
		pooler.Prepare(p.chain, 0, nil)
		s.discardPrepared(p.id)
	}
	if size > 0 {
		pooler.Prepare(p.chain, size, func() (engine.Spec, error) { return s.preparedSpec(p) })
		s.keepPool(p)
	}
	return nil
}

// blankSizeLocked is how many blank machines of a snapshot are kept.
func (s *Service) blankSizeLocked(id string) int {
	if n, ok := s.blank[id]; ok {
		return n
	}
	return s.cfg.PoolSize
}

// blankPool returns the size of a blank pool and how much of it is there.
func (s *Service) blankPool(id string) (want, ready int) {
	pooler, ok := s.cfg.Engine.(engine.Pooler)
	if !ok {
		return 0, 0
	}
	s.mu.Lock()
	want = s.blankSizeLocked(id)
	s.mu.Unlock()
	return want, pooler.Pooled(id)
}

// withBlank adds the snapshots whose blank pool was set.
func (s *Service) withBlank(ids []string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.blank {
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}
