package bench

import (
	"context"

	"forkd.dev/forkd/internal/errdefs"
)

// prepared is a pool made ready for one run.
type prepared struct {
	tookMS      float64
	cpuSPerFork *float64
	release     func(ctx context.Context) error
}

// prepare fills the pool for a fork of n. The pool is emptied again by release, so
// that no refill disturbs what is measured next.
func (s *subject) prepare(ctx context.Context, pool Pool, n int) (prepared, error) {
	p := prepared{release: func(context.Context) error { return nil }}
	if pool == PoolNone {
		return p, nil
	}
	return p, errdefs.New(errdefs.ErrUnsupported, "pool %s for %d", pool, n)
}
