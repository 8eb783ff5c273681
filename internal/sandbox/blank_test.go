package sandbox

import (
	"errors"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

// TestBlankPoolHasTheSizeThatWasSet: larger, smaller, none and the default again;
// what is above the new size goes with its directory.
func TestBlankPoolHasTheSizeThatWasSet(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PoolSize = 1 })
	base := w.base()
	set := func(n int) WarmPool {
		t.Helper()
		p, err := w.svc.SetBlankPool(w.ctx(), "base", n)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	holds := func(n int) func() bool {
		return func() bool { return w.driver.Pooled(base.ID) == n && len(w.dirs()) == n }
	}
	if p := set(5); p.Blank != 5 || p.SnapshotID != base.ID {
		t.Errorf("%+v", p)
	}
	w.eventually("it holds 5", holds(5))
	if list, err := w.svc.WarmPools(w.ctx()); err != nil || len(list) != 1 || list[0].BlankReady != 5 || list[0].Want != 0 {
		t.Errorf("%+v, %v", list, err)
	}
	for _, sb := range w.fork("base", 5) {
		if sb.Timing.Pool != PoolBlank {
			t.Errorf("%s came from pool %s", sb.ID, sb.Timing.Pool)
		}
		if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
			t.Fatal(err)
		}
	}
	w.eventually("it holds 5 again", holds(5))
	set(2)
	w.eventually("it holds 2", holds(2))
	set(0)
	w.eventually("it holds none", holds(0))
	sb := w.fork("base", 1)[0]
	if sb.Timing.Pool != PoolNone || w.driver.Pooled(base.ID) != 0 {
		t.Errorf("a fork filled a pool of 0, or came from it: %+v", sb.Timing)
	}
	if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
		t.Fatal(err)
	}
	set(DefaultBlank)
	w.eventually("it holds the default", holds(1))
	for _, n := range []int{DefaultBlank - 1, MaxWarm + 1} {
		if _, err := w.svc.SetBlankPool(w.ctx(), "base", n); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%d: %v", n, err)
		}
	}
	if _, err := w.svc.SetBlankPool(w.ctx(), "absent", 1); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("absent: %v", err)
	}
}

func TestBlankPoolKeepsToTheBudget(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MemoryBudgetMiB = 3 * blankMiB })
	w.base()
	if _, err := w.svc.SetBlankPool(w.ctx(), "base", 4); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("%v", err)
	}
}
