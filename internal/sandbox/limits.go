package sandbox

import (
	"context"
	"fmt"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// Bounds of what a fork can ask for.
const (
	maxCPULimitPercent = 100 * 1024
	minCPULimitPercent = 1
	minPIDsLimit       = 16 // the machine's own threads, those of its disk as well
	maxPIDsLimit       = 1 << 22
)

// limitsOf are the limits a sandbox was forked with.
func limitsOf(info Sandbox) engine.Limits {
	return engine.Limits{MemoryMiB: info.MemoryLimitMiB, PIDs: info.PIDsLimit, CPUPercent: info.CPULimitPercent}
}

// limits is what the engine is asked to enforce.
func (f Fork) limits() engine.Limits {
	return engine.Limits{MemoryMiB: f.MemoryLimitMiB, PIDs: f.PIDsLimit, CPUPercent: f.CPULimitPercent}
}

// poolable returns snapshotID if prepared machines of it will do for f, else "": they
// were made with the default limits, which not every engine can change, and a warm one
// has reseeded its runners.
func (s *Service) poolable(f Fork, snapshotID string) string {
	_, limiter := s.cfg.Engine.(engine.Limiter)
	if f.Cold || (f.limits() != (engine.Limits{}) && !limiter) || f.Reseed.Mode == agentwire.ReseedSystem {
		return ""
	}
	return snapshotID
}

// limit gives a machine that c claimed the limits of the call. One that cannot have
// them is given up: c gets another.
func (b *batch) limit(ctx context.Context, c *child) error {
	limits := b.req.limits()
	if limits == (engine.Limits{}) {
		return nil
	}
	limiter, ok := b.s.cfg.Engine.(engine.Limiter)
	if ok {
		err := limiter.Limit(ctx, c.info.ID, limits)
		if err == nil {
			return nil
		}
		b.s.cfg.Log("%v: it is replaced by a new one", err)
	}
	if c.link != nil {
		c.link.close()
	}
	c.machine, c.link, c.info.Timing.Pool = nil, nil, PoolNone
	return b.s.discard(c.info.ID)
}

func (s *Service) checkLimits(l engine.Limits) error {
	if l == (engine.Limits{}) {
		return nil
	}
	least := s.cfg.Engine.Probe(context.Background()).MinMemoryLimitMiB
	switch {
	case l.MemoryMiB < 0:
		return errdefs.New(errdefs.ErrInvalid, "memory limit of %d MiB is negative", l.MemoryMiB)
	case l.MemoryMiB > 0 && l.MemoryMiB < least:
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "memory limit of %d MiB is less than the %d MiB that a machine of engine %s needs for itself",
			l.MemoryMiB, least, s.cfg.Engine.Name()), "ask for %d MiB or more; py-base works well with 256", least)
	case l.CPUPercent != 0 && (l.CPUPercent < minCPULimitPercent || l.CPUPercent > maxCPULimitPercent):
		return errdefs.New(errdefs.ErrInvalid, "CPU limit of %g processors is not between %g and %g",
			float64(l.CPUPercent)/100, float64(minCPULimitPercent)/100, float64(maxCPULimitPercent)/100)
	case l.PIDs != 0 && (l.PIDs < minPIDsLimit || l.PIDs > maxPIDsLimit):
		return errdefs.New(errdefs.ErrInvalid, "limit of %d processes is not between %d and %d", l.PIDs, minPIDsLimit, maxPIDsLimit)
	}
	return nil
}

// defaultBudgetPercent is the share of the host's memory that sandboxes may use.
const defaultBudgetPercent = 80

// memory is what admission knows of the host's memory.
type memory struct {
	budgetMiB   int // what sandboxes may use together
	occupiedMiB int // of it, now
	freeMiB     int // what the host can still give, whoever uses it
}

// room is how much more may be used.
func (m memory) roomMiB() int { return min(m.budgetMiB-m.occupiedMiB, m.freeMiB) }

// binds says in words what keeps more from fitting.
func (m memory) binds() string {
	if m.freeMiB < m.budgetMiB-m.occupiedMiB {
		return fmt.Sprintf("memory binds: the host has %d MiB left", max(m.freeMiB, 0))
	}
	return fmt.Sprintf("memory binds: sandboxes use %d MiB of their budget of %d MiB", m.occupiedMiB, m.budgetMiB)
}

// readMemory measures; it holds no lock.
func (s *Service) readMemory() (memory, error) {
	host, err := linux.ReadHostMemory()
	if err != nil {
		return memory{}, fmt.Errorf("admit sandboxes: %w", err)
	}
	m := memory{budgetMiB: s.cfg.MemoryBudgetMiB}
	if m.budgetMiB == 0 {
		m.budgetMiB = int(host.TotalKiB / 1024 * defaultBudgetPercent / 100)
	}
	// A host that is used up to its last page serves nobody.
	m.freeMiB = int((host.AvailableKiB - host.TotalKiB/20) / 1024)
	if meter, ok := s.cfg.Engine.(engine.MemoryMeter); ok {
		kib, err := meter.OccupiedKiB()
		if err != nil {
			return memory{}, fmt.Errorf("admit sandboxes: %w", err)
		}
		m.occupiedMiB = int(kib / 1024)
	}
	return m, nil
}
