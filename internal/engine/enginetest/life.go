package enginetest

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// testBoot boots the only machine that is booted and captures it.
func (s *suite) testBoot(t *testing.T) {
	spec := s.spec(t)
	ctx := within(t, s.h.BootPatience)
	m, err := s.d.Boot(ctx, spec)
	s.noError(t, "boot", err)
	if m.ID() != spec.ID || m.PID() <= 0 || m.Reason() != "" {
		t.Errorf("booted machine has id %q, pid %d, reason %q", m.ID(), m.PID(), m.Reason())
	}
	conn, err := m.DialAgent(ctx)
	s.noError(t, "dial agent", err)
	b := &box{m: m}
	b.guest, err = s.h.Connect(ctx, conn)
	if err != nil {
		t.Fatalf("connect to agent of a booted machine: %v\nconsole: %s", err, s.console(t, m))
	}
	s.noError(t, "start guest", s.h.Start(ctx, b.guest))
	s.noError(t, "ping", b.guest.Ping(ctx))
	if !s.lacks(t, Consoles) && s.console(t, m) == "" {
		t.Error("the console of a booted machine is empty")
	}
	s.checkUsage(t, m)
	s.put(t, b, rootKey, rootText, rootFile, rootText)
	s.want(t, b, rootKey, rootText, rootFile, rootText)
	s.base = s.capture(keepDirs{t}, b, engine.AfterEnd)
}

// keepDirs is a test whose directories stay: the whole suite forks from them.
type keepDirs struct{ *testing.T }

// Cleanup drops f: the harness removes Harness.Dir as a whole.
func (keepDirs) Cleanup(func()) {}

func (s *suite) console(t testing.TB, m engine.Machine) string {
	t.Helper()
	r, err := m.Console()
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, 1<<20))
	s.noError(t, "read console", err)
	return string(b)
}

func (s *suite) checkUsage(t *testing.T, m engine.Machine) {
	t.Helper()
	u, err := m.Usage(s.ctx(t))
	s.noError(t, "usage", err)
	limit := int64(s.h.Shape.MemoryMiB+2048) << 10
	if u.RSSKiB <= 0 || u.PSSKiB <= 0 || u.RSSKiB > limit || u.PSSKiB > u.RSSKiB || u.PrivateKiB > u.RSSKiB || u.DiskBytes < 0 || u.CPU < 0 {
		t.Errorf("usage is not plausible: %+v", u)
	}
}

func (s *suite) testProbe(t *testing.T) {
	p := s.d.Probe(s.ctx(t))
	if !p.Available || p.Reason == "" || p.Version == "" || p.Accelerator == "" {
		t.Errorf("probe of an engine that runs machines: %+v", p)
	}
	switch p.Isolation {
	case engine.IsolationHardware, engine.IsolationEmulated, engine.IsolationUserKernel:
	default:
		t.Errorf("isolation is %q", p.Isolation)
	}
	for _, l := range p.Lost {
		t.Logf("the engine lacks here: %s", l)
	}
}

func (s *suite) testCompat(t *testing.T) {
	c, err := s.d.Compat(s.h.Root)
	s.noError(t, "compat", err)
	s.noError(t, "check own compat", s.d.CheckCompat(c))
	if c.Engine != s.d.Name() || c.EngineBuild == "" {
		t.Errorf("compat of engine %s is %+v", s.d.Name(), c)
	}
	for what, change := range map[string]func(*engine.Compat){
		"another engine":      func(c *engine.Compat) { c.Engine = "other" },
		"another build":       func(c *engine.Compat) { c.EngineBuild += ".other" },
		"another accelerator": func(c *engine.Compat) { c.Accelerator = "other" },
	} {
		other := c
		change(&other)
		if err := s.d.CheckCompat(other); !errors.Is(err, errdefs.ErrIncompatible) {
			t.Errorf("state of %s: error is %v, want class incompatible", what, err)
		}
	}
}

func (s *suite) testPause(t *testing.T) {
	b := s.fork(t, s.base)
	for range 2 {
		s.noError(t, "pause", b.m.Pause(s.ctx(t)))
	}
	silent, cancel := context.WithTimeout(context.Background(), s.h.Silence)
	defer cancel()
	if err := b.guest.Ping(silent); err == nil {
		t.Error("a paused guest answered")
	}
	for range 2 {
		s.noError(t, "resume", b.m.Resume(s.ctx(t)))
	}
	// The connection may have been given up with the call.
	_ = b.guest.Close()
	s.dial(t, b)
	s.noError(t, "ping after resume", b.guest.Ping(s.ctx(t)))
	s.want(t, b, rootKey, rootText, "", "")
	s.kill(t, b)
}

func (s *suite) testKill(t *testing.T) {
	b := s.fork(t, s.base)
	select {
	case <-b.m.Done():
		t.Fatal("Done is closed while the machine runs")
	default:
	}
	s.kill(t, b)
	for range 2 {
		s.noError(t, "kill again", b.m.Kill(s.ctx(t)))
	}
	ctx := s.ctx(t)
	if err := b.m.Pause(ctx); err == nil {
		t.Error("a killed machine was paused")
	}
	if err := b.m.Resume(ctx); err == nil {
		t.Error("a killed machine was resumed")
	}
	if _, err := b.m.DialAgent(ctx); err == nil {
		t.Error("the agent of a killed machine was dialed")
	}
	if _, err := b.m.Capture(ctx, engine.CaptureSpec{Dir: s.artifactDir(t), Parent: s.base}); err == nil {
		t.Error("a killed machine was captured")
	}
	stopped := s.restore(t, s.base)
	s.noError(t, "kill a machine that never ran", stopped.Kill(s.ctx(t)))
	s.ended(t, stopped)
	var wg sync.WaitGroup
	many := s.fork(t, s.base)
	for range 4 {
		wg.Go(func() {
			if err := many.m.Kill(s.ctx(t)); err != nil {
				t.Errorf("one of four kills at once: %v", err)
			}
		})
	}
	wg.Wait()
	s.ended(t, many.m)
}

func (s *suite) testCrash(t *testing.T) {
	b := s.fork(t, s.base)
	s.h.Crash(t, b.m)
	s.ended(t, b.m)
	if b.m.Reason() == "killed" {
		t.Error("a machine that was ended from outside says that it was killed by us")
	}
	if err := b.guest.Ping(s.ctx(t)); err == nil {
		t.Error("the agent of an ended machine answered")
	}
	s.noError(t, "kill a machine that has ended", b.m.Kill(s.ctx(t)))
	if _, err := s.d.Adopt(s.ctx(t), b.m.ID(), s.h.Dir+"/"+b.m.ID()); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("adopt an ended machine: error is %v, want class not found", err)
	}
}

func (s *suite) testReap(t *testing.T) {
	spec := s.spec(t)
	for range 2 {
		s.noError(t, "reap a machine that never was", s.d.Reap(s.ctx(t), spec.ID, spec.Dir))
	}
	m, err := s.d.Restore(s.ctx(t), spec, s.base)
	s.noError(t, "restore", err)
	other := s.fork(t, s.base)
	for range 2 {
		s.noError(t, "reap", s.d.Reap(s.ctx(t), spec.ID, spec.Dir))
	}
	s.ended(t, m)
	s.noError(t, "ping a machine that was not reaped", other.guest.Ping(s.ctx(t)))
	s.kill(t, other)
}

// testCancel: a call that is given up leaves nothing.
func (s *suite) testCancel(t *testing.T) {
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	spec := s.spec(t)
	if _, err := s.d.Restore(gone, spec, s.base); !errors.Is(err, context.Canceled) {
		t.Errorf("restore with a cancelled context: error is %v", err)
	}
	s.notListed(t, spec.ID)
	spec = s.spec(t)
	if _, err := s.d.Boot(gone, spec); !errors.Is(err, context.Canceled) {
		t.Errorf("boot with a cancelled context: error is %v", err)
	}
	s.notListed(t, spec.ID)
	// In the middle: whichever moment is met, either the machine is whole or nothing is left.
	for _, after := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond} {
		spec := s.spec(t)
		ctx, cancel := context.WithTimeout(context.Background(), after)
		m, err := s.d.Restore(ctx, spec, s.base)
		cancel()
		if err == nil {
			b := &box{m: m, chain: s.base}
			s.wake(t, b)
			s.kill(t, b)
			continue
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("restore given up after %v: error is %v", after, err)
		}
		s.notListed(t, spec.ID)
	}
	s.restored(t)
}

// restored checks that restoring still works.
func (s *suite) restored(t *testing.T) {
	t.Helper()
	b := s.fork(t, s.base)
	s.want(t, b, rootKey, rootText, rootFile, rootText)
	s.kill(t, b)
}

func (s *suite) testDialAgain(t *testing.T) {
	b := s.fork(t, s.base)
	for i := range 3 {
		if i%2 == 0 {
			_ = b.guest.Close() // the polite way; otherwise the peer has vanished
		}
		s.dial(t, b)
		s.noError(t, "ping on a new connection", b.guest.Ping(s.ctx(t)))
	}
	s.kill(t, b)
}

// testFleet restores many at once: all answer, all differ.
func (s *suite) testFleet(t *testing.T) {
	began := time.Now()
	var wg sync.WaitGroup
	ctx := within(t, s.h.Patience+time.Duration(s.h.Fleet)*s.h.Patience/10)
	boxes := make([]*box, s.h.Fleet)
	errs := make([]error, s.h.Fleet)
	for i := range boxes {
		spec := s.spec(t)
		wg.Go(func() { boxes[i], errs[i] = s.launch(ctx, spec) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("restore %d of %d: %v", i, len(errs), err)
		}
	}
	t.Logf("%d machines restored and identified in %v", len(boxes), time.Since(began).Round(time.Millisecond))
	ids, err := s.d.Orphans(s.ctx(t))
	s.noError(t, "list machines", err)
	if len(ids) != len(boxes) {
		t.Errorf("%d machines are listed, %d run", len(ids), len(boxes))
	}
	for _, b := range boxes {
		s.noError(t, "set", b.guest.Set(s.ctx(t), "mine", b.m.ID()))
	}
	for _, b := range boxes {
		s.want(t, b, "mine", b.m.ID(), rootFile, rootText)
	}
	for _, b := range boxes {
		s.kill(t, b)
	}
}

// launch is fork for goroutines that must not end the test.
func (s *suite) launch(ctx context.Context, spec engine.Spec) (*box, error) {
	m, err := s.d.Restore(ctx, spec, s.base)
	if err != nil {
		return nil, err
	}
	b := &box{m: m, chain: s.base}
	conn, err := m.DialAgent(ctx)
	if err != nil {
		return nil, err
	}
	if err := m.Resume(ctx); err != nil {
		return nil, err
	}
	if b.guest, err = s.h.Connect(ctx, conn); err != nil {
		return nil, err
	}
	receipt, err := b.guest.VerdictFork(ctx, identity(m.ID()))
	if err != nil {
		return nil, err
	}
	for _, step := range receipt.Steps {
		if strings.EqualFold(step.Status, "failed") {
			return nil, errdefs.New(errdefs.ErrGuest, "step %s of the fork contract failed: %s", step.Name, step.Detail)
		}
	}
	return b, nil
}
