package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
)

// metered is the fake engine with a fixed size for each machine.
type metered struct {
	*fake.Driver
	host    *fake.Registry
	eachMiB int
	moreMiB atomic.Int64 // occupied by what else there is
}

func (m *metered) OccupiedKiB() (int64, error) {
	return (int64(len(m.host.Running())*m.eachMiB) + m.moreMiB.Load()) * 1024, nil
}

// meteredWorld is a host on which room for n machines is in the budget.
func meteredWorld(t *testing.T, n int) (*world, *metered) {
	meter := &metered{eachMiB: reserveMiB}
	w := newWorld(t, func(c *Config) {
		meter.Driver = c.Engine.(*fake.Driver)
		c.Engine, c.MemoryBudgetMiB = meter, n*reserveMiB
	})
	meter.host = w.host
	return w, meter
}

func (w *world) tryFork(n int, wait time.Duration) error {
	items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: n, Wait: wait}, nil)
	if err == nil && len(items) != n {
		w.t.Errorf("%d of %d sandboxes were made", len(items), n)
	}
	return err
}

func (w *world) kill(ref string) {
	w.t.Helper()
	if err := w.svc.Kill(w.ctx(), ref); err != nil {
		w.t.Fatal(err)
	}
}

func TestAdmissionSaysHowManyFit(t *testing.T) {
	w, _ := meteredWorld(t, 3)
	w.base()
	w.fork("base", 1)
	err := w.tryFork(5, 0)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	for _, part := range []string{"fork 5 sandboxes", "2 more fit", "memory binds", "use 48 MiB of their budget of 144 MiB"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not say %q: %v", part, err)
		}
	}
	if !strings.Contains(errdefs.Hint(err), "--wait") {
		t.Errorf("hint is %q", errdefs.Hint(err))
	}
	if err := w.tryFork(2, 0); err != nil {
		t.Errorf("what fits is refused: %v", err)
	}
}

// copying is an engine whose forks share no memory.
type copying struct{ *metered }

func (c copying) Probe(ctx context.Context) engine.Probe {
	p := c.Driver.Probe(ctx)
	p.SharesMemory = false
	return p
}

// TestAdmissionOfCopies: where forks copy the memory of their snapshot, each is
// expected to need that as well.
func TestAdmissionOfCopies(t *testing.T) {
	const each = reserveMiB + 1 // the fake's memory is stored in some bytes
	for room, fits := range map[int]int{4 * each: 4, 4*each - 1: 3} {
		meter := &metered{}
		w := newWorld(t, func(c *Config) {
			meter.Driver = c.Engine.(*fake.Driver)
			c.Engine, c.MemoryBudgetMiB = copying{meter}, room
		})
		meter.host = w.host
		base := w.base()
		if base.ForkMemory != MemoryCopied {
			t.Errorf("memory of forks: %q", base.ForkMemory)
		}
		err := w.tryFork(5, 0)
		w.wantClass(err, errdefs.ErrResourceExhausted)
		if err != nil && !strings.Contains(err.Error(), fmt.Sprintf("%d more fit", fits)) {
			t.Errorf("with %d MiB: %v", room, err)
		}
		if err := w.tryFork(fits, 0); err != nil {
			t.Errorf("with %d MiB %d do not fit: %v", room, fits, err)
		}
		w.killAll()
	}
}

func TestAdmissionByCount(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxSandboxes = 2 })
	w.base()
	err := w.tryFork(3, 0)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	if !strings.Contains(err.Error(), "2 more fit") || !strings.Contains(err.Error(), "--max-sandboxes") {
		t.Errorf("error is %v", err)
	}
}

// TestWaitersInOrder: who came first is served first, also if the second would fit.
func TestWaitersInOrder(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxSandboxes = 3 })
	w.base()
	held := w.fork("base", 3)
	type outcome struct {
		who string
		err error
	}
	done := make(chan outcome, 2)
	wait := func(who string, n, queued int) {
		t.Helper()
		go func() { done <- outcome{who, w.tryFork(n, patience)} }()
		w.eventually(who+" waits", func() bool { return w.queued() == queued })
	}
	wait("large", 2, 1)
	wait("small", 1, 2)
	// One place is free: enough for the second, who must not take it.
	w.kill(held[0].ID)
	err := w.tryFork(1, 0)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	if err != nil && !strings.Contains(err.Error(), "others who wait") {
		t.Errorf("one who comes later is told %v", err)
	}
	if n := w.queued(); n != 2 {
		t.Fatalf("%d wait, want 2", n)
	}
	w.kill(held[1].ID)
	if o := <-done; o.who != "large" || o.err != nil {
		t.Fatalf("first was %s (%v), want large", o.who, o.err)
	}
	w.kill(held[2].ID)
	if o := <-done; o.who != "small" || o.err != nil {
		t.Fatalf("second was %s (%v), want small", o.who, o.err)
	}
}

func (w *world) queued() int {
	w.svc.mu.Lock()
	defer w.svc.mu.Unlock()
	return len(w.svc.queue)
}

func TestWaitEnds(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxSandboxes = 1 })
	w.base()
	held := w.fork("base", 1)
	err := w.tryFork(1, 30*time.Millisecond)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	if err != nil && !strings.Contains(err.Error(), "after 30ms") {
		t.Errorf("error is %v", err)
	}
	// One who gives up leaves the queue to the next.
	ctx, cancel := context.WithCancel(w.ctx())
	gone := make(chan error, 1)
	go func() {
		_, err := w.svc.Fork(ctx, Fork{Snapshot: "base", N: 1, Wait: patience}, nil)
		gone <- err
	}()
	w.eventually("one waits", func() bool { return w.queued() == 1 })
	next := make(chan error, 1)
	go func() { next <- w.tryFork(1, patience) }()
	w.eventually("two wait", func() bool { return w.queued() == 2 })
	cancel()
	w.wantClass(<-gone, context.Canceled)
	w.kill(held[0].ID)
	if err := <-next; err != nil {
		t.Errorf("the next is not served: %v", err)
	}
	err = w.tryFork(1, MaxWait+1)
	w.wantClass(err, errdefs.ErrInvalid)
}

// TestWarmGivesWay: warm machines of one snapshot make room for forks of another,
// but not for more warm machines; they come back when there is room.
func TestWarmGivesWay(t *testing.T) {
	w, _ := meteredWorld(t, 4)
	w.base()
	w.create(CreateSnapshot{Tag: "other", From: "base"})
	w.warm("other", 3)
	if _, err := w.svc.SetWarmPool(w.ctx(), "base", 3); err != nil {
		t.Fatal(err)
	}
	w.warmReady(4) // no more fit
	w.eventually("the pool says that it is full", func() bool {
		pools, err := w.svc.WarmPools(w.ctx())
		return err == nil && len(pools) == 2 && strings.Contains(pools[0].Reason+pools[1].Reason, "memory binds")
	})
	made := w.fork("other", 4) // three claimed, and the warm one of base gives way
	warm := 0
	for _, sb := range made {
		if sb.Timing.Pool == PoolWarm {
			warm++
		}
	}
	if warm != 3 || w.warmCount() != 0 {
		t.Errorf("%d of 4 came from the warm pool, %d warm ones are left", warm, w.warmCount())
	}
	for _, sb := range made {
		w.kill(sb.ID)
	}
	w.warmReady(4)
	w.noWarm("base")
	w.noWarm("other")
}

// TestBlankGivesWay: blank machines of one snapshot make room for forks of another.
func TestBlankGivesWay(t *testing.T) {
	meter := &metered{eachMiB: reserveMiB}
	w := newWorld(t, func(c *Config) {
		meter.Driver = c.Engine.(*fake.Driver)
		c.Engine, c.MemoryBudgetMiB, c.PoolSize = meter, 4*reserveMiB, 2
	})
	meter.host = w.host
	base := w.base()
	w.create(CreateSnapshot{Tag: "other", From: "base"})
	sb := w.fork("base", 1)[0]
	w.eventually("blank machines are ready", func() bool { return meter.Pooled(base.ID) == 2 })
	made := w.fork("other", 3)
	if n := meter.Pooled(base.ID); n != 0 {
		t.Errorf("%d blank machines are left", n)
	}
	for _, sb := range append(made, sb) {
		w.kill(sb.ID)
	}
}

// TestWarmSurvivesRestart: the wish does, the machines do not; it goes with its snapshot.
func TestWarmSurvivesRestart(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	w.warm("base", 2)
	w.restart()
	w.warmReady(2)
	if err := w.svc.Untag(w.ctx(), "base"); err != nil {
		t.Fatal(err)
	}
	w.restart()
	w.warmReady(2)
	if err := w.svc.DeleteSnapshot(w.ctx(), base.ID, Delete{}); err != nil {
		t.Fatal(err)
	}
	w.restart()
	if pools, err := w.svc.WarmPools(w.ctx()); err != nil || len(pools) != 0 {
		t.Errorf("pools of a deleted snapshot are %v, %v", pools, err)
	}
}

func TestLimitsReachTheEngine(t *testing.T) {
	var got atomic.Pointer[engine.Spec]
	w := newWorld(t, func(c *Config) { c.Engine = &specSpy{Driver: c.Engine.(*fake.Driver), got: &got} })
	w.base()
	items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1, MemoryLimitMiB: 256, CPULimitPercent: 150, PIDsLimit: 64}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := engine.Limits{MemoryMiB: 256, CPUPercent: 150, PIDs: 64}
	if got.Load().Limits != want {
		t.Errorf("the engine was told %+v, want %+v", got.Load().Limits, want)
	}
	w.restart()
	sb, err := w.svc.Sandbox(w.ctx(), items[0].Sandbox.ID)
	if err != nil || sb.MemoryLimitMiB != 256 || sb.CPULimitPercent != 150 || sb.PIDsLimit != 64 {
		t.Errorf("after a restart the sandbox is %+v, %v", sb, err)
	}
	for _, bad := range []Fork{{MemoryLimitMiB: -1}, {MemoryLimitMiB: 50}, {CPULimitPercent: -5}, {PIDsLimit: 3}} {
		bad.Snapshot, bad.N = "base", 1
		_, err := w.svc.Fork(w.ctx(), bad, nil)
		w.wantClass(err, errdefs.ErrInvalid)
	}
}

// TestLimitsOfClaimedMachines: a prepared machine, blank or warm, gets the limits of the
// fork that claims it; one that cannot have them is replaced.
func TestLimitsOfClaimedMachines(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PoolSize = 1 })
	w.base()
	w.fork("base", 1)
	pooled := func() {
		w.eventually("a blank machine is there", func() bool { return w.driver.Pooled(must(w.svc.Snapshot(w.ctx(), "base")).ID) == 1 })
	}
	limits := engine.Limits{MemoryMiB: 256, CPUPercent: 150, PIDs: 64}
	fork := func(pool PoolKind) {
		t.Helper()
		items := must(w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1, MemoryLimitMiB: 256, CPULimitPercent: 150, PIDsLimit: 64}, nil))
		sb := items[0].Sandbox
		if got := w.host.Limits(sb.ID); got != limits || sb.Timing.Pool != pool {
			t.Errorf("a %s machine has limits %+v", sb.Timing.Pool, got)
		}
		if got := w.eval(sb.ID, "value"); got != "warm" {
			t.Errorf("it has %q", got)
		}
	}
	pooled()
	fork(PoolBlank)
	pooled()
	w.script.onFault(func(op fake.Op, _ string) error {
		if op == fake.OpLimit {
			return errors.New("scripted")
		}
		return nil
	})
	fork(PoolNone)
	w.script.onFault(nil)
	if _, err := w.svc.SetWarmPool(w.ctx(), "base", 1); err != nil {
		t.Fatal(err)
	}
	w.warmReady(1)
	fork(PoolWarm)
}

// specSpy is the fake engine that notes what a restore was asked for.
type specSpy struct {
	*fake.Driver
	got *atomic.Pointer[engine.Spec]
}

func (d *specSpy) Restore(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	d.got.Store(&spec)
	return d.Driver.Restore(ctx, spec, chain)
}

func (d *specSpy) Probe(ctx context.Context) engine.Probe {
	p := d.Driver.Probe(ctx)
	p.MinMemoryLimitMiB = 96
	return p
}
