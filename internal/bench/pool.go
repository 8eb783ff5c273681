package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// prepared is a pool made ready for one run.
type prepared struct {
	tookMS      float64
	cpuSPerFork *float64
}

// How a pool is watched while it fills: a machine takes up to a second or two, so
// one that gets no more for patience does not fill.
const (
	poolStep     = 100 * time.Millisecond
	poolPatience = 60 * time.Second
)

// prepare fills the pool for a fork of n. There are no other prepared machines of
// the snapshot then.
func (s *subject) prepare(ctx context.Context, pool Pool, n int) (prepared, error) {
	if pool == PoolNone {
		return prepared{}, nil
	}
	s.cfg.step("filling the pool with %d %s machines", n, pool)
	cpu, start := s.meter.read(), time.Now()
	set := s.cfg.Client.SetPool
	if pool == PoolBlank {
		set = s.cfg.Client.SetBlankPool
	}
	if _, err := set(ctx, s.ref, n); err != nil {
		return prepared{}, fmt.Errorf("fill the pool: %w", err)
	}
	if err := s.filled(ctx, pool, n); err != nil {
		return prepared{}, fmt.Errorf("fill the pool: %w", err)
	}
	return prepared{tookMS: millis(time.Since(start)), cpuSPerFork: s.meter.since(cpu, n)}, nil
}

// filled waits until the pool holds n.
func (s *subject) filled(ctx context.Context, pool Pool, n int) error {
	tick := time.NewTicker(poolStep)
	defer tick.Stop()
	most, since := 0, time.Now()
	for {
		ready, reason, err := s.pooled(ctx, pool)
		switch {
		case err != nil:
			return err
		case ready >= n:
			return nil
		case reason != "":
			return errdefs.New(errdefs.ErrUnavailable, "the daemon stopped at %d of %d machines: %s", ready, n, reason)
		case time.Since(since) > poolPatience:
			return errdefs.WithHint(errdefs.New(errdefs.ErrTimeout, "the daemon stays at %d of %d machines", ready, n), "look at its log")
		}
		if ready > most {
			most, since = ready, time.Now()
			if s.cfg.Progress != nil {
				s.cfg.Progress(fmt.Sprintf("filling the pool with %d %s machines", n, pool), float64(ready)/float64(n))
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pooled returns how many prepared machines there are, and why there are no more.
func (s *subject) pooled(ctx context.Context, pool Pool) (int, string, error) {
	list, err := s.cfg.Client.Pools(ctx)
	if err != nil {
		return 0, "", err
	}
	for _, p := range list {
		if p.SnapshotID != s.detail.ID {
			continue
		}
		if pool == PoolBlank {
			return p.BlankReady, "", nil
		}
		return p.Ready, p.Reason, nil
	}
	return 0, "", nil
}

// emptyPools ends all prepared machines of the snapshot, so that no refill disturbs
// what is measured and no fork claims what was not asked for.
func (s *subject) emptyPools(ctx context.Context) error {
	_, warm := s.cfg.Client.SetPool(ctx, s.ref, 0)
	_, blank := s.cfg.Client.SetBlankPool(ctx, s.ref, 0)
	if err := errors.Join(warm, blank); err != nil {
		return fmt.Errorf("empty the pools: %w", err)
	}
	return nil
}

// savePools remembers what the pools are set to.
func (s *subject) savePools(ctx context.Context) error {
	list, err := s.cfg.Client.Pools(ctx)
	if err != nil {
		return err
	}
	saved := forkd.Pool{Blank: forkd.DefaultBlank}
	for _, p := range list {
		if p.SnapshotID == s.detail.ID {
			saved = p
		}
	}
	s.pools = &saved
	return nil
}

// restorePools sets the pools to what they were. A blank pool gets the daemon's
// default: its size is no setting that lasts.
func (s *subject) restorePools(ctx context.Context) error {
	if s.pools == nil || s.throwaway {
		return nil
	}
	_, blank := s.cfg.Client.SetBlankPool(ctx, s.ref, forkd.DefaultBlank)
	_, warm := s.cfg.Client.SetPool(ctx, s.ref, s.pools.Warm)
	if err := errors.Join(blank, warm); err != nil && !errors.Is(err, forkd.ErrNotFound) {
		return fmt.Errorf("set the pools back: %w", err)
	}
	return nil
}
