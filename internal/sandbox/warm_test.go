package sandbox

import (
	"context"
	"errors"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
)

// warm asks for n warm machines of ref and waits until they are ready.
func (w *world) warm(ref string, n int) {
	w.t.Helper()
	if _, err := w.svc.SetWarmPool(w.ctx(), ref, n); err != nil {
		w.t.Fatal(err)
	}
	w.warmReady(n)
}

// warmReady waits until all pools together have n ready machines.
func (w *world) warmReady(n int) {
	w.t.Helper()
	w.eventually("warm machines are ready", func() bool { return w.warmCount() == n })
}

func (w *world) warmCount() int {
	w.t.Helper()
	pools, err := w.svc.WarmPools(w.ctx())
	if err != nil {
		w.t.Fatal(err)
	}
	ready := 0
	for _, p := range pools {
		ready += p.Ready
	}
	return ready
}

// noWarm ends the pool, so that the end of a test finds nothing.
func (w *world) noWarm(ref string) {
	w.t.Helper()
	if _, err := w.svc.SetWarmPool(w.ctx(), ref, 0); err != nil {
		w.t.Fatal(err)
	}
}

func TestWarmPool(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	w.warm("base", 3)
	pools, err := w.svc.WarmPools(w.ctx())
	if err != nil || len(pools) != 1 || pools[0].SnapshotID != base.ID || pools[0].Want != 3 || len(pools[0].Tags) != 1 {
		t.Fatalf("pools are %+v, %v", pools, err)
	}
	seen := map[string]bool{}
	for i, sb := range w.fork("base", 4) {
		want := PoolWarm
		if i == 3 {
			want = PoolNone
		}
		if sb.Timing.Pool != want || seen[sb.ID] {
			t.Errorf("child %d came from pool %s, want %s", i, sb.Timing.Pool, want)
		}
		seen[sb.ID] = true
		if host := strings.TrimSpace(w.exec(sb.ID, "hostname")); host != sb.ID {
			t.Errorf("hostname of %s is %q: the identity of the rehearsal is left", sb.ID, host)
		}
		if v := w.eval(sb.ID, "value"); v != "warm" {
			t.Errorf("value in %s is %q", sb.ID, v)
		}
	}
	w.warmReady(3) // refilled
	w.noWarm("base")
	if n := w.warmCount(); n != 0 {
		t.Errorf("%d warm machines are left", n)
	}
}

// TestWarmDead: a warm machine that died while it waited is not handed out.
func TestWarmDead(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	w.warm("base", 1)
	for _, id := range w.host.Running() {
		w.host.Crash(id, "killed by the test")
	}
	sb := w.fork("base", 1)[0]
	if sb.Timing.Pool == PoolWarm {
		t.Errorf("a dead warm machine was handed out")
	}
	w.noWarm("base")
}

// TestWarmFailure: a pool that cannot be filled says why and is not tried forever.
func TestWarmFailure(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	w.script.onFault(func(op fake.Op, _ string) error {
		if op == fake.OpRestore {
			return errdefs.New(errdefs.ErrUnavailable, "no more machines")
		}
		return nil
	})
	if _, err := w.svc.SetWarmPool(w.ctx(), "base", 2); err != nil {
		t.Fatal(err)
	}
	w.eventually("the pool says why it is empty", func() bool {
		pools, err := w.svc.WarmPools(w.ctx())
		return err == nil && len(pools) == 1 && strings.Contains(pools[0].Reason, "no more machines")
	})
	w.script.onFault(nil)
	w.noWarm("base")
}

func TestWarmRefuses(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	for ref, n := range map[string]int{"base": -1, "sn": 1} {
		_, err := w.svc.SetWarmPool(w.ctx(), ref, n)
		if !errors.Is(err, errdefs.ErrInvalid) && !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("set %s to %d: %v", ref, n, err)
		}
	}
	_, err := w.svc.SetWarmPool(context.Background(), "base", MaxWarm+1)
	w.wantClass(err, errdefs.ErrInvalid)
}
