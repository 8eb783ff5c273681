package qemu

import (
	"context"

	"forkd.dev/forkd/internal/engine"
)

// limiter applies cgroup limits to machines.
type limiter struct{ installation string }

func newLimiter(installation string) limiter { return limiter{installation: installation} }

func (l limiter) lost() string                             { return "" }
func (l limiter) apply(engine.Spec, int) error             { return nil }
func (d *Driver) oomKilled(string) bool                    { return false }
func (d *Driver) freeLimits(context.Context, string) error { return nil }
