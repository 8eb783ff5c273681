package sandbox

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/metadata"
)

func TestKill(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
		t.Fatal(err)
	}
	for _, call := range []func() error{
		func() error { return w.svc.Kill(w.ctx(), sb.ID) },
		func() error { _, err := w.svc.Sandbox(w.ctx(), sb.ID); return err },
		func() error { _, err := w.svc.Ping(w.ctx(), sb.ID); return err },
		func() error { _, err := w.svc.Usage(w.ctx(), sb.ID); return err },
	} {
		w.wantClass(call(), errdefs.ErrNotFound)
	}
	w.empty()
}

func TestKillAtOnce(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	var wg sync.WaitGroup
	var ok atomic.Int32
	for range 8 {
		wg.Go(func() {
			err := w.svc.Kill(w.ctx(), sb.ID)
			switch {
			case err == nil:
				ok.Add(1)
			case !errors.Is(err, errdefs.ErrConflict) && !errors.Is(err, errdefs.ErrNotFound):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if ok.Load() != 1 {
		t.Errorf("%d of 8 kills of one sandbox succeeded", ok.Load())
	}
	w.empty()
}

// TestKillCancelled: from its decision on, a kill does not depend on who asked.
func TestKillCancelled(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	ctx, cancel := context.WithCancel(w.ctx())
	w.script.onFault(func(op fake.Op, _ string) error {
		if op == fake.OpKill {
			cancel()
		}
		return nil
	})
	if err := w.svc.Kill(ctx, sb.ID); err != nil {
		t.Error(err)
	}
	w.empty()
}

// TestKillFails: a kill that fails at any step can be repeated.
func TestKillFails(t *testing.T) {
	for _, op := range []fake.Op{fake.OpKill, fake.OpReap} {
		t.Run(string(op), func(t *testing.T) {
			w := newWorld(t, nil)
			w.base()
			sb := w.fork("base", 1)[0]
			var n atomic.Int32
			w.script.onFault(func(at fake.Op, _ string) error {
				if at == op && n.Add(1) == 1 {
					return errdefs.New(errdefs.ErrUnavailable, "scripted failure")
				}
				return nil
			})
			w.wantClass(w.svc.Kill(w.ctx(), sb.ID), errdefs.ErrUnavailable)
			if _, err := w.svc.Sandbox(w.ctx(), sb.ID); err != nil {
				t.Errorf("after a failed kill: %v", err)
			}
			if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
				t.Errorf("second kill: %v", err)
			}
			w.empty()
		})
	}
}

// TestSandboxDies: a machine that ends by itself leaves a reason that can be read, and
// nothing else.
func TestSandboxDies(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1, Name: "worker"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	id := items[0].Sandbox.ID
	w.host.Crash(id, "oom: the host killed it")
	w.eventually("the sandbox has failed", func() bool {
		row, err := w.journal.GetSandbox(w.ctx(), id)
		return err == nil && row.State == string(Failed)
	})
	sb := must(w.svc.Sandbox(w.ctx(), id))
	if sb.State != Failed || sb.Reason != "oom: the host killed it" || sb.EndedAt.IsZero() || sb.PID != 0 {
		t.Errorf("the sandbox is %+v", sb)
	}
	for what, call := range map[string]func() error{
		"exec": func() error {
			_, err := w.svc.Exec(w.ctx(), id, agentwire.ExecRequest{Argv: []string{"echo"}})
			return err
		},
		"eval":  func() error { _, err := w.svc.Eval(w.ctx(), id, agentwire.EvalRequest{Code: "value"}); return err },
		"ping":  func() error { _, err := w.svc.Ping(w.ctx(), id); return err },
		"usage": func() error { _, err := w.svc.Usage(w.ctx(), id); return err },
	} {
		if err := call(); !errors.Is(err, errdefs.ErrConflict) {
			t.Errorf("%s: error is %v, want class conflict", what, err)
		}
	}
	if dirs := w.dirs(); len(dirs) > 0 {
		t.Errorf("directories are left: %v", dirs)
	}
	if sn := must(w.svc.Snapshot(w.ctx(), "base")); sn.Sandboxes != 0 {
		t.Errorf("the snapshot counts %d sandboxes", sn.Sandboxes)
	}
	// Its name is free, and the new one has it.
	items, err = w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1, Name: "worker"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := must(w.svc.Sandbox(w.ctx(), "worker")); got.ID != items[0].Sandbox.ID {
		t.Errorf("the name leads to %s", got.ID)
	}
	w.restart()
	if got := must(w.svc.Sandbox(w.ctx(), id)); got.State != Failed || got.Reason != sb.Reason {
		t.Errorf("after a restart it is %+v", got)
	}
	if got := must(w.svc.Sandbox(w.ctx(), "worker")); got.ID != items[0].Sandbox.ID {
		t.Errorf("after a restart the name leads to %s", got.ID)
	}
	if err := w.svc.Kill(w.ctx(), id); err != nil {
		t.Errorf("forget a failed sandbox: %v", err)
	}
	w.consistent()
}

// TestDiesDuringExec: the caller is told that the machine ended, and why.
func TestDiesDuringExec(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	_, err := w.svc.Exec(w.ctx(), sb.ID, agentwire.ExecRequest{Argv: []string{"die"}})
	w.wantClass(err, errdefs.ErrGuest)
	w.eventually("it has failed", func() bool { return must(w.svc.Sandbox(w.ctx(), sb.ID)).State == Failed })
}

// TestHungGuest: a guest that does not answer blocks neither others, nor those who
// give up, nor its own end.
func TestHungGuest(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	var hang atomic.Bool
	w.script.onGuest(func(string) fake.GuestFaults {
		return fake.GuestFaults{Hold: func(string) <-chan struct{} {
			if hang.Load() {
				return make(chan struct{})
			}
			return nil
		}}
	})
	pair := w.fork("base", 2)
	w.restart() // the connections are made again
	hang.Store(true)
	var wg sync.WaitGroup
	first, cancel := context.WithCancel(w.ctx())
	defer cancel()
	dialed := make(chan struct{}, 8)
	w.script.onFault(func(op fake.Op, _ string) error {
		if op == fake.OpDial {
			dialed <- struct{}{}
		}
		return nil
	})
	wg.Go(func() {
		if _, err := w.svc.Ping(first, pair[0].ID); err == nil {
			t.Error("a hung guest answered")
		}
	})
	<-dialed // it says hello, in vain
	impatient, stop := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer stop()
	began := time.Now()
	if _, err := w.svc.Ping(impatient, pair[0].ID); errdefs.Class(err) != errdefs.ErrTimeout {
		t.Errorf("error is %v, want class timeout", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("who gave up after 20 ms waited %v", took)
	}
	if err := w.svc.Kill(w.ctx(), pair[0].ID); err != nil {
		t.Errorf("kill a sandbox whose guest hangs: %v", err)
	}
	wg.Wait()
	wg.Go(func() {
		if _, err := w.svc.Ping(w.ctx(), pair[1].ID); err == nil {
			t.Error("a hung guest answered")
		}
	})
	<-dialed
	began = time.Now()
	w.close()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the daemon needed %v to end while a guest hung", took)
	}
	wg.Wait()
	hang.Store(false)
	w.script.onFault(nil)
	w.open()
	w.exec(pair[1].ID, "hostname")
}

func TestReconnects(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	m, err := w.driver.Adopt(w.ctx(), sb.ID, filepath.Join(w.machines(), sb.ID))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := m.DialAgent(w.ctx()) // somebody takes the connection over
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	_, err = w.svc.Ping(w.ctx(), sb.ID)
	w.wantClass(err, errdefs.ErrUnavailable)
	w.exec(sb.ID, "hostname")
}

func TestExecRefuses(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	for _, req := range []agentwire.ExecRequest{
		{}, {Argv: []string{""}}, {Argv: []string{"x"}, Timeout: -1}, {Argv: []string{"x"}, Timeout: 25 * time.Hour},
		{Argv: []string{"x"}, OutputLimit: -1}, {Argv: []string{"x"}, OutputLimit: agentwire.MaxOutputLimit + 1},
	} {
		_, err := w.svc.Exec(w.ctx(), sb.ID, req)
		w.wantClass(err, errdefs.ErrInvalid)
	}
	_, err := w.svc.Eval(w.ctx(), sb.ID, agentwire.EvalRequest{Timeout: -1})
	w.wantClass(err, errdefs.ErrInvalid)
	res, err := w.svc.Exec(w.ctx(), sb.ID, agentwire.ExecRequest{Argv: []string{"exit", "7"}})
	if err != nil || res.ExitCode != 7 {
		t.Errorf("exit 7: %+v, %v", res, err)
	}
}

// TestPrivateSession: the sandboxes of a private daemon end with it, also those that
// are being made.
func TestPrivateSession(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Session = "private-1" })
	w.base()
	w.fork("base", 3)
	made := make(chan struct{})
	go func() {
		defer close(made)
		_, _ = w.svc.Fork(context.Background(), Fork{Snapshot: "base", N: 20}, nil)
	}()
	w.eventually("some of them run", func() bool { return len(w.host.Running()) > 5 })
	w.close()
	<-made
	if ids := w.host.Running(); len(ids) > 0 {
		t.Errorf("machines are left: %v", ids)
	}
	if dirs := w.dirs(); len(dirs) > 0 {
		t.Errorf("directories are left: %v", dirs)
	}
	w.open()
	w.empty()
	// One that crashed is cleaned up after by the next.
	w.fork("base", 3)
	w.dead()
	w.buried()
	w.empty()
}

func TestClosedRefuses(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	svc := w.svc
	w.close()
	_, err := svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1}, nil)
	w.wantClass(err, errdefs.ErrUnavailable)
	_, err = svc.CreateSnapshot(w.ctx(), CreateSnapshot{Image: "debian"}, nil)
	w.wantClass(err, errdefs.ErrUnavailable)
	_, err = svc.BuildImage(w.ctx(), BuildImage{Name: "x"}, nil)
	w.wantClass(err, errdefs.ErrUnavailable)
	w.open()
}

// TestCloseEndsWork: forks under way when the daemon ends leave nothing half-made.
func TestCloseEndsWork(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	w.script.onGuest(func(string) fake.GuestFaults { return fake.GuestFaults{HangHello: true} })
	dialed := make(chan struct{}, 100)
	w.script.onFault(func(op fake.Op, _ string) error {
		if op == fake.OpDial {
			dialed <- struct{}{}
		}
		return nil
	})
	ended := make(chan error, 1)
	svc := w.svc
	go func() {
		_, err := svc.Fork(context.Background(), Fork{Snapshot: "base", N: 2}, nil)
		ended <- err
	}()
	<-dialed
	w.close()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a fork that the end of the daemon cut short has no error")
		}
	default:
		t.Error("the daemon ended before a fork under way did")
	}
	if ids := w.host.Running(); len(ids) > 0 {
		t.Errorf("machines are left: %v", ids)
	}
	w.script.onGuest(nil)
	w.script.onFault(nil)
	w.open()
	w.empty()
}

func TestPool(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PoolSize = 2 })
	base := w.base()
	first := w.fork("base", 1)[0]
	if first.Timing.Pool != PoolNone {
		t.Error("the first fork came from a pool")
	}
	full := func() bool { return w.driver.Pooled(base.ID) == 2 }
	w.eventually("the pool is full", full)
	some := w.fork("base", 3)
	pooled := 0
	for _, sb := range some {
		if sb.Timing.Pool == PoolBlank {
			pooled++
		}
		if v := w.eval(sb.ID, "value"); v != "warm" {
			t.Errorf("value is %q", v)
		}
	}
	if pooled != 2 {
		t.Errorf("%d of 3 came from a pool of 2", pooled)
	}
	w.eventually("the pool is full again", full)
	for _, sb := range append(some, first) {
		if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
			t.Fatal(err)
		}
	}
	// A prepared machine that died is not handed out.
	for _, id := range w.host.Running() {
		w.host.Crash(id, "died in the pool")
	}
	w.exec(w.fork("base", 1)[0].ID, "hostname")
	w.eventually("the pool is full after that", full)
	for _, sb := range must(w.svc.Sandboxes(w.ctx())) {
		if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.svc.DeleteSnapshot(w.ctx(), "base", Delete{}); err != nil {
		t.Fatal(err)
	}
	w.eventually("nothing of the pool is left", func() bool { return len(w.host.Running()) == 0 && len(w.dirs()) == 0 })
}

// TestPoolOfDeadDaemon: what a pool held is gone after a crash.
func TestPoolOfDeadDaemon(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.PoolSize = 3 })
	base := w.base()
	sb := w.fork("base", 1)[0]
	w.eventually("the pool is full", func() bool { return w.driver.Pooled(base.ID) == 3 })
	w.dead()
	// The driver of a daemon that was killed ends nothing: keep it from doing so.
	_ = w.svc.Close(w.ctx())
	w.script.onFault(nil)
	w.script.onStep(nil)
	w.svc = nil
	w.open()
	if ids := w.host.Running(); len(ids) != 1 || ids[0] != sb.ID {
		t.Errorf("machines are %v, want %s", ids, sb.ID)
	}
	w.consistent()
}

// TestForgottenAfterADay: the reason of an end is readable for a day.
func TestForgottenAfterADay(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	sb := w.fork("base", 1)[0]
	w.host.Crash(sb.ID, "gone")
	w.eventually("it has failed", func() bool {
		row, err := w.journal.GetSandbox(w.ctx(), sb.ID)
		return err == nil && row.State == string(Failed)
	})
	row, err := w.journal.GetSandbox(w.ctx(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	row.EndedAt = time.Now().Add(-keepEnded - time.Minute)
	if err := w.journal.UpdateSandboxes(w.ctx(), []metadata.Sandbox{row}); err != nil {
		t.Fatal(err)
	}
	w.restart()
	_, err = w.svc.Sandbox(w.ctx(), sb.ID)
	w.wantClass(err, errdefs.ErrNotFound)
}

// TestStrangeDirectories: what is not ours in the sandbox directory is left alone.
func TestStrangeDirectories(t *testing.T) {
	w := newWorld(t, nil)
	strange := filepath.Join(w.machines(), "lost+found")
	stale := filepath.Join(w.machines(), "sb00000000000000000000")
	for _, dir := range []string{strange, stale} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	w.restart()
	if dirs := w.dirs(); len(dirs) != 1 || dirs[0] != "lost+found" {
		t.Errorf("directories are %v", dirs)
	}
	if err := os.Remove(strange); err != nil {
		t.Fatal(err)
	}
}
