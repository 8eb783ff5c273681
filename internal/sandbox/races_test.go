package sandbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// TestRaces has many callers do everything to the same few sandboxes and snapshots at
// once. Each call succeeds or is refused for a stated reason, and what is left in the
// end is consistent.
func TestRaces(t *testing.T) {
	const callers, sandboxes = 8, 3
	rounds := 60
	if testing.Short() {
		rounds = 20
	}
	w := newWorld(t, nil)
	w.base()
	var mu sync.Mutex
	var refs []string // of sandboxes that may be there
	some := func(r *rand.Rand) string {
		mu.Lock()
		defer mu.Unlock()
		return refs[r.IntN(len(refs))]
	}
	for _, sb := range w.fork("base", sandboxes) {
		refs = append(refs, sb.ID)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	tag := func(r *rand.Rand) string { return fmt.Sprint("tag-", r.IntN(4)) }
	calls := []func(r *rand.Rand) (string, error){
		func(r *rand.Rand) (string, error) {
			_, err := w.svc.Branch(ctx, some(r), Branch{Tag: tag(r), Replace: r.IntN(2) == 0, NoWait: r.IntN(2) == 0, NoFreeze: r.IntN(3) == 0})
			return "branch", err
		},
		func(r *rand.Rand) (string, error) {
			_, err := w.svc.Checkpoint(ctx, some(r), Checkpoint{Sync: r.IntN(2) == 0})
			return "checkpoint", err
		},
		func(r *rand.Rand) (string, error) {
			_, err := w.svc.Rollback(ctx, some(r), "")
			return "rollback", err
		},
		func(r *rand.Rand) (string, error) {
			items, err := w.svc.Fork(ctx, Fork{Snapshot: some(r), N: 1 + r.IntN(2)}, nil)
			mu.Lock()
			defer mu.Unlock()
			for _, it := range items {
				refs = append(refs, it.Sandbox.ID)
			}
			return "fork of a sandbox", err
		},
		func(r *rand.Rand) (string, error) {
			_, err := w.svc.Fork(ctx, Fork{Snapshot: tag(r), N: 1, Labels: map[string]string{"dies": "yes"}}, nil)
			return "fork of a snapshot", err
		},
		func(r *rand.Rand) (string, error) {
			mu.Lock()
			if len(refs) <= sandboxes {
				mu.Unlock()
				return "", nil
			}
			at := r.IntN(len(refs))
			id := refs[at]
			refs = append(refs[:at:at], refs[at+1:]...)
			mu.Unlock()
			return "kill", w.svc.Kill(ctx, id)
		},
		func(r *rand.Rand) (string, error) {
			return "delete", w.svc.DeleteSnapshot(ctx, tag(r), Delete{Cascade: r.IntN(2) == 0})
		},
		func(r *rand.Rand) (string, error) {
			_, err := w.svc.CompactSnapshot(ctx, Compact{From: tag(r), To: tag(r), Replace: true}, nil)
			return "compact", err
		},
		func(r *rand.Rand) (string, error) {
			_, err := w.svc.Prune(ctx, Prune{Keep: 4, HasKeep: true})
			return "prune", err
		},
		func(r *rand.Rand) (string, error) {
			_, err := w.svc.Snapshots(ctx)
			return "list", err
		},
		func(r *rand.Rand) (string, error) {
			e, err := w.svc.resolve(some(r))
			if err == nil {
				w.svc.autoCheckpoint(ctx, e, time.Now())
			}
			return "auto checkpoint", err
		},
	}
	var g sync.WaitGroup
	for range callers {
		seed := rand.Uint64()
		g.Go(func() {
			r := rand.New(rand.NewPCG(seed, 2))
			for range rounds {
				name, err := calls[r.IntN(len(calls))](r)
				if err == nil || errors.Is(err, errdefs.ErrConflict) || errors.Is(err, errdefs.ErrNotFound) ||
					errors.Is(err, errdefs.ErrNotReady) || errors.Is(err, errdefs.ErrInvalid) || errors.Is(err, errdefs.ErrGuest) {
					continue
				}
				t.Errorf("%s: %v (%s)", name, err, errdefs.Code(err))
			}
		})
	}
	g.Wait()
	for _, e := range w.svc.known() {
		if err := e.left(ctx, Capturing); err != nil {
			t.Error(err)
		}
	}
	w.svc.calls.Wait()
	w.orderly("after all")
	for _, sb := range must(w.svc.Sandboxes(w.ctx())) {
		if err := w.svc.Kill(w.ctx(), sb.ID); err != nil {
			t.Error(err)
		}
	}
	for _, sn := range must(w.svc.Snapshots(w.ctx())) {
		if sn.Labels[labelAnonymous] != "" || sn.Labels[labelCheckpointOf] != "" {
			if len(w.store.Dependents(sn.ID)) == 0 {
				t.Errorf("snapshot %s stays, although nothing needs it: %v, used by %v", sn.ID, sn.Labels, w.store.Holders(sn.ID))
			}
		}
	}
}

// orderly is what consistent checks, where captures may have failed.
func (w *world) orderly(when string) {
	w.t.Helper()
	v := &victim{world: w}
	v.wholeSnapshots(when)
}
