package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/errdefs"
)

func TestForkMakesDistinctSandboxes(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	var told []int
	items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 10, Labels: map[string]string{"who": "me"}}, func(it ForkItem) {
		told = append(told, it.Index)
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(told)
	seen := map[string]bool{}
	batch := ""
	for i, it := range items {
		sb := it.Sandbox
		if it.Err != nil || it.Index != i || told[i] != i || seen[sb.ID] {
			t.Fatalf("item %d of %v is %+v", i, told, it)
		}
		seen[sb.ID] = true
		if sb.State != Running || sb.SnapshotID != base.ID || sb.SnapshotTag != "base" || sb.Isolation != engine.IsolationEmulated || sb.PID == 0 {
			t.Errorf("sandbox %+v", sb)
		}
		if sb.Labels["who"] != "me" || sb.Labels[labelParent] != base.ID || sb.Labels[labelIndex] != fmt.Sprint(i) || sb.Labels[labelBatch] == "" {
			t.Errorf("labels are %v", sb.Labels)
		}
		if batch != "" && batch != sb.Labels[labelBatch] {
			t.Errorf("batches %s and %s in one fork", batch, sb.Labels[labelBatch])
		}
		batch = sb.Labels[labelBatch]
		if sb.Receipt == nil || len(sb.Receipt.Steps) == 0 || sb.Timing.Total < sb.Timing.Identity || sb.Timing.Identity < sb.Timing.Hello {
			t.Errorf("receipt %+v, timing %+v", sb.Receipt, sb.Timing)
		}
		if host := strings.TrimSpace(w.exec(sb.ID, "hostname")); host != sb.ID {
			t.Errorf("hostname of %s is %s", sb.ID, host)
		}
		w.eval(sb.ID, "value="+sb.ID)
		w.exec(sb.ID, "write", "/data", sb.ID)
	}
	for _, it := range items {
		if v := w.eval(it.Sandbox.ID, "value"); v != it.Sandbox.ID {
			t.Errorf("sandbox %s has value %s", it.Sandbox.ID, v)
		}
		if text := w.exec(it.Sandbox.ID, "cat", "/data"); text != it.Sandbox.ID {
			t.Errorf("sandbox %s has /data %s", it.Sandbox.ID, text)
		}
	}
	w.consistent()
}

func TestForkRefuses(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.MaxSandboxes = 30 })
	w.base()
	long := strings.Repeat("x", 60<<10)
	for name, c := range map[string]struct {
		fork  Fork
		class error
	}{
		"none":              {Fork{Snapshot: "base"}, errdefs.ErrInvalid},
		"negative":          {Fork{Snapshot: "base", N: -1}, errdefs.ErrInvalid},
		"too many":          {Fork{Snapshot: "base", N: 100000}, errdefs.ErrInvalid},
		"more than fit":     {Fork{Snapshot: "base", N: 31}, errdefs.ErrResourceExhausted},
		"unknown tag":       {Fork{Snapshot: "nothing", N: 1}, errdefs.ErrNotFound},
		"path as tag":       {Fork{Snapshot: "../../etc", N: 1}, errdefs.ErrInvalid},
		"empty tag":         {Fork{Snapshot: "", N: 1}, errdefs.ErrInvalid},
		"unknown id":        {Fork{Snapshot: "sn00000000000000000000", N: 1}, errdefs.ErrNotFound},
		"unknown engine":    {Fork{Snapshot: "base", N: 1, Engine: "vax"}, errdefs.ErrInvalid},
		"other memory":      {Fork{Snapshot: "base", N: 1, Shape: engine.Shape{MemoryMiB: 1024}}, errdefs.ErrInvalid},
		"other cpus":        {Fork{Snapshot: "base", N: 1, Shape: engine.Shape{CPUs: 4}}, errdefs.ErrInvalid},
		"other disk":        {Fork{Snapshot: "base", N: 1, Shape: engine.Shape{DiskMiB: 65}}, errdefs.ErrInvalid},
		"name for two":      {Fork{Snapshot: "base", N: 2, Name: "two"}, errdefs.ErrInvalid},
		"bad name":          {Fork{Snapshot: "base", N: 1, Name: "../x"}, errdefs.ErrInvalid},
		"id as name":        {Fork{Snapshot: "base", N: 1, Name: "sb00000000000000000000"}, errdefs.ErrInvalid},
		"bad label":         {Fork{Snapshot: "base", N: 1, Labels: map[string]string{"a b": ""}}, errdefs.ErrInvalid},
		"variable with =":   {Fork{Snapshot: "base", N: 1, Env: map[string]string{"A=B": ""}}, errdefs.ErrInvalid},
		"variable with NUL": {Fork{Snapshot: "base", N: 1, Env: map[string]string{"A": "\x00"}}, errdefs.ErrInvalid},
		"huge environment":  {Fork{Snapshot: "base", N: 1, Env: map[string]string{"A": long}}, errdefs.ErrInvalid},
		"negative limit":    {Fork{Snapshot: "base", N: 1, MemoryLimitMiB: -1}, errdefs.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			items, err := w.svc.Fork(w.ctx(), c.fork, func(it ForkItem) { t.Errorf("told of %+v", it) })
			if !errors.Is(err, c.class) || items != nil {
				t.Errorf("fork gave %v, error %v, want class %v", items, err, c.class)
			}
		})
	}
	w.empty()
	// The same shape is no mismatch, and the limit counts what is admitted only.
	items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 30, Shape: engine.Shape{CPUs: 1, MemoryMiB: 512, DiskMiB: 64}, Engine: "fake"}, nil)
	if err != nil || len(items) != 30 {
		t.Fatalf("fork of 30: %v", err)
	}
	_, err = w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 1}, nil)
	w.wantClass(err, errdefs.ErrResourceExhausted)
	if err := w.svc.Kill(w.ctx(), items[0].Sandbox.ID); err != nil {
		t.Fatal(err)
	}
	w.fork("base", 1)
}

// TestForkFailure: at whichever step one child fails, without Partial no child is
// left, with it the others are.
func TestForkFailure(t *testing.T) {
	errBroken := errdefs.New(errdefs.ErrUnavailable, "scripted failure")
	for _, op := range []fake.Op{fake.OpRestore, fake.OpLoad, fake.OpResume, fake.OpDial} {
		t.Run(string(op), func(t *testing.T) {
			w := newWorld(t, nil)
			w.base()
			var n atomic.Int32
			fail := func(at fake.Op, _ string) error {
				if at == op && n.Add(1) == 3 {
					return errBroken
				}
				return nil
			}
			w.script.onFault(fail)
			items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 8}, nil)
			w.wantClass(err, errdefs.ErrUnavailable)
			if items != nil {
				t.Errorf("items of a failed fork: %v", items)
			}
			w.empty()
			n.Store(0)
			items, err = w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 8, Partial: true}, nil)
			if err != nil {
				t.Fatal(err)
			}
			failed := 0
			for _, it := range items {
				if it.Err != nil {
					failed++
					w.wantClass(it.Err, errdefs.ErrUnavailable)
					if it.Sandbox.ID != "" {
						t.Errorf("failed child %d has sandbox %s", it.Index, it.Sandbox.ID)
					}
					continue
				}
				w.exec(it.Sandbox.ID, "hostname")
			}
			if failed != 1 {
				t.Errorf("%d of 8 failed, one was to", failed)
			}
			w.consistent()
			w.script.onFault(func(at fake.Op, _ string) error {
				if at == op {
					return errBroken
				}
				return nil
			})
			if _, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 2, Partial: true}, nil); err == nil {
				t.Error("a partial fork of which all children failed has no error")
			}
			w.consistent()
		})
	}
}

// TestForkGuestDies: the guest ends while it is given its identity.
func TestForkGuestDies(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	w.script.onGuest(func(string) fake.GuestFaults { return fake.GuestFaults{DieAfter: 2} })
	_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 2}, nil)
	w.wantClass(err, errdefs.ErrGuest)
	w.empty()
}

// TestForkCancelled: a fork that is given up in the middle leaves nothing, at any step.
func TestForkCancelled(t *testing.T) {
	for _, op := range []fake.Op{fake.OpRestore, fake.OpLoad, fake.OpResume, fake.OpDial} {
		t.Run(string(op), func(t *testing.T) {
			w := newWorld(t, nil)
			w.base()
			ctx, cancel := context.WithCancel(w.ctx())
			var n atomic.Int32
			w.script.onFault(func(at fake.Op, _ string) error {
				if at == op && n.Add(1) == 5 {
					cancel()
				}
				return nil
			})
			_, err := w.svc.Fork(ctx, Fork{Snapshot: "base", N: 20, Partial: true}, nil)
			if err == nil {
				// Those that came up before are kept by a partial fork.
				for _, sb := range must(w.svc.Sandboxes(w.ctx())) {
					if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
						t.Error(err)
					}
				}
			}
			w.empty()
			n.Store(0)
			ctx, cancel = context.WithCancel(w.ctx())
			defer cancel()
			_, err = w.svc.Fork(ctx, Fork{Snapshot: "base", N: 20}, nil)
			w.wantClass(err, context.Canceled)
			w.empty()
		})
	}
	t.Run("hung guests", func(t *testing.T) {
		w := newWorld(t, nil)
		w.base()
		ctx, cancel := context.WithCancel(w.ctx())
		defer cancel()
		var hung atomic.Int32
		w.script.onGuest(func(string) fake.GuestFaults {
			return fake.GuestFaults{Hold: func(call string) <-chan struct{} {
				if call == "verdict" && hung.Add(1) == 4 {
					cancel()
				}
				return make(chan struct{})
			}, HangHello: true}
		})
		var dialed atomic.Int32
		w.script.onFault(func(at fake.Op, _ string) error {
			if at == fake.OpDial && dialed.Add(1) == 3 {
				cancel()
			}
			return nil
		})
		_, err := w.svc.Fork(ctx, Fork{Snapshot: "base", N: 3}, nil)
		w.wantClass(err, context.Canceled)
		w.empty()
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestForkConcurrently(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: "base", N: 25}, nil)
			if err != nil || len(items) != 25 {
				t.Errorf("fork of 25: %d items, %v", len(items), err)
			}
		})
	}
	wg.Wait()
	all, err := w.svc.Sandboxes(w.ctx())
	if err != nil || len(all) != 50 {
		t.Fatalf("%d sandboxes, %v", len(all), err)
	}
	for _, sb := range all {
		wg.Go(func() {
			res, err := w.svc.Exec(w.ctx(), sb.ID, agentwire.ExecRequest{Argv: []string{"hostname"}})
			if err != nil || strings.TrimSpace(string(res.Stdout)) != sb.ID {
				t.Errorf("exec in %s: %q, %v", sb.ID, res.Stdout, err)
			}
		})
	}
	wg.Wait()
	if got := must(w.svc.Snapshot(w.ctx(), "base")).Sandboxes; got != 50 {
		t.Errorf("the snapshot counts %d sandboxes", got)
	}
	w.consistent()
}

func TestNamesAreUnique(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	named := Fork{Snapshot: "base", N: 1, Name: "worker"}
	items, err := w.svc.Fork(w.ctx(), named, nil)
	if err != nil {
		t.Fatal(err)
	}
	if host := strings.TrimSpace(w.exec("worker", "hostname")); host != "worker" {
		t.Errorf("hostname is %s", host)
	}
	if got := must(w.svc.Sandbox(w.ctx(), "worker")); got.ID != items[0].Sandbox.ID {
		t.Errorf("the name leads to %s", got.ID)
	}
	_, err = w.svc.Fork(w.ctx(), named, nil)
	w.wantClass(err, errdefs.ErrConflict)
	w.consistent()
	if err := w.svc.Kill(w.ctx(), "worker"); err != nil {
		t.Fatal(err)
	}
	_, err = w.svc.Sandbox(w.ctx(), "worker")
	w.wantClass(err, errdefs.ErrNotFound)
	var wg sync.WaitGroup
	var won atomic.Int32
	for range 8 {
		wg.Go(func() {
			switch _, err := w.svc.Fork(w.ctx(), named, nil); {
			case err == nil:
				won.Add(1)
			case !errors.Is(err, errdefs.ErrConflict):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 {
		t.Errorf("%d of 8 got the same name", won.Load())
	}
	w.consistent()
}

func TestRefs(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	sb := w.fork("base", 1)[0]
	for _, ref := range []string{sb.ID, sb.ID[:12]} {
		if got, err := w.svc.Sandbox(w.ctx(), ref); err != nil || got.ID != sb.ID {
			t.Errorf("%s leads to %s, %v", ref, got.ID, err)
		}
	}
	if got, err := w.svc.Snapshot(w.ctx(), base.ID[:12]); err != nil || got.ID != base.ID {
		t.Errorf("prefix leads to %s, %v", got.ID, err)
	}
	for _, ref := range []string{"sb", "sb0", base.ID, "nobody"} {
		_, err := w.svc.Sandbox(w.ctx(), ref)
		w.wantClass(err, errdefs.ErrNotFound)
	}
	for _, ref := range []string{"", "../x", "a b", strings.Repeat("a", 100)} {
		_, err := w.svc.Sandbox(w.ctx(), ref)
		w.wantClass(err, errdefs.ErrInvalid)
	}
	w.fork(base.ID, 1)
	if got := must(w.svc.Sandboxes(w.ctx())); len(got) != 2 || got[1].SnapshotTag != "" {
		t.Errorf("sandboxes are %+v", got)
	}
}
