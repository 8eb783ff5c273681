package sandbox

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

// TestBuiltinOnce: ten that need the built-in at the same time share one build.
func TestBuiltinOnce(t *testing.T) {
	w := newWorld(t, nil)
	gate := make(chan struct{})
	w.images.build = func(ctx context.Context) error {
		select {
		case <-gate:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	var wg sync.WaitGroup
	var told atomic.Int32
	for range 10 {
		wg.Go(func() {
			var once sync.Once
			progress := func(string, float64) { once.Do(func() { told.Add(1) }) }
			items, err := w.svc.Fork(w.ctx(), Fork{Snapshot: PyBase, N: 2, Progress: progress}, nil)
			if err != nil || len(items) != 2 || items[0].Sandbox.SnapshotTag != PyBase {
				t.Errorf("fork of the built-in: %+v, %v", items, err)
			}
		})
	}
	w.waiting("snapshot "+PyBase, 10)
	close(gate)
	wg.Wait()
	if w.images.builds != 1 {
		t.Errorf("%d image builds for 10 requests", w.images.builds)
	}
	if all := must(w.svc.Snapshots(w.ctx())); len(all) != 1 || all[0].Tags[0] != PyBase {
		t.Errorf("snapshots are %+v", all)
	}
	if told.Load() != 10 {
		t.Errorf("%d of 10 were told of the progress", told.Load())
	}
	w.consistent()
}

// waiting waits until n callers share the operation key.
func (w *world) waiting(key string, n int) {
	w.t.Helper()
	fs := &w.svc.builds
	w.eventually("all wait", func() bool {
		fs.mu.Lock()
		f := fs.running[key]
		fs.mu.Unlock()
		if f == nil {
			return false
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.waiting == n
	})
}

// TestBuiltinCancelled: the build goes on while somebody waits, and ends with the last.
func TestBuiltinCancelled(t *testing.T) {
	w := newWorld(t, nil)
	started, stopped := make(chan struct{}), make(chan struct{})
	w.images.build = func(ctx context.Context) error {
		close(started)
		<-ctx.Done()
		close(stopped)
		return ctx.Err()
	}
	ctxs := make([]context.CancelFunc, 3)
	errs := make(chan error, 3)
	for i := range ctxs {
		ctx, cancel := context.WithCancel(w.ctx())
		ctxs[i] = cancel
		go func() {
			_, err := w.svc.Fork(ctx, Fork{Snapshot: PyBase, N: 1}, nil)
			errs <- err
		}()
	}
	w.waiting("snapshot "+PyBase, 3)
	<-started
	for _, cancel := range ctxs {
		select {
		case <-stopped:
			t.Fatal("the build ended while somebody waited")
		default:
		}
		cancel()
		w.wantClass(<-errs, context.Canceled)
	}
	<-stopped
	// Who comes next starts anew.
	w.images.mu.Lock()
	w.images.build = nil
	w.images.mu.Unlock()
	w.fork(PyBase, 1)
	w.consistent()
}

// TestBuiltinFails: all that wait get the error, and the next request tries again.
func TestBuiltinFails(t *testing.T) {
	w := newWorld(t, nil)
	w.images.build = func(context.Context) error { return errdefs.New(errdefs.ErrUnavailable, "no network") }
	for range 2 {
		_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: PyBase, N: 1}, nil)
		w.wantClass(err, errdefs.ErrUnavailable)
	}
	if w.images.builds != 2 {
		t.Errorf("%d builds", w.images.builds)
	}
	w.empty()
	w.wantClass(w.svc.Prepare(w.ctx(), "other", nil), errdefs.ErrInvalid)
	w.images.build = nil
	if err := w.svc.Prepare(w.ctx(), PyBase, nil); err != nil {
		t.Fatal(err)
	}
	w.fork(PyBase, 1)
}

// TestBuiltinAtClose: a build under way ends with the daemon.
func TestBuiltinAtClose(t *testing.T) {
	w := newWorld(t, nil)
	began := make(chan struct{})
	w.images.build = func(ctx context.Context) error {
		close(began)
		<-ctx.Done()
		return ctx.Err()
	}
	failed := make(chan error, 1)
	svc := w.svc
	go func() {
		_, err := svc.Fork(context.Background(), Fork{Snapshot: PyBase, N: 1}, nil)
		failed <- err
	}()
	<-began
	w.close()
	if err := <-failed; err == nil {
		t.Error("a fork whose build was stopped has no error")
	}
	w.open()
	w.empty()
}
