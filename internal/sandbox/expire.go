package sandbox

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/snapshot"
)

// autoTagLife is how long a branch stays that nobody gave a tag.
const autoTagLife = 24 * time.Hour

// sweepEvery is how often expired snapshots are looked for.
const sweepEvery = 5 * time.Minute

// withLabels returns the labels of a and b together, those of b winning.
func withLabels(a, b map[string]string) map[string]string {
	out := make(map[string]string, len(a)+len(b))
	maps.Copy(out, a)
	maps.Copy(out, b)
	return out
}

// labelCompactedFrom names the snapshot that a compacted one is the same as.
const labelCompactedFrom = "forkd.compacted-from"

func branchedFrom(m snapshot.Manifest) string {
	if id := m.Labels[labelCompactedFrom]; id != "" {
		return "compact:" + id
	}
	return m.Labels[labelBranchedFrom]
}

// expiryOf is when m goes unless something speaks for it, or zero.
func expiryOf(m snapshot.Manifest) time.Time {
	at, err := time.Parse(time.RFC3339, m.Labels[labelExpires])
	if err != nil {
		return time.Time{}
	}
	return at
}

// sweep deletes expired snapshots until ctx ends.
func (s *Service) sweep(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		if err := s.expire(ctx, time.Now()); err != nil && ctx.Err() == nil {
			s.cfg.Log("look for expired snapshots: %v", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// expire deletes the snapshots whose time was over at now and that nobody has given
// a tag, uses or builds on. Children come before their parents.
func (s *Service) expire(ctx context.Context, now time.Time) error {
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return err
	}
	list := s.cfg.Store.List()
	slices.Reverse(list) // a child is younger than its parent
	for _, m := range list {
		at := expiryOf(m)
		if at.IsZero() || at.After(now) || len(s.cfg.Store.Dependents(m.ID)) > 0 || len(s.cfg.Store.Holders(m.ID)) > 0 {
			continue
		}
		if slices.ContainsFunc(tags[m.ID], func(tag string) bool { return tag != m.Labels[labelAutoTag] }) {
			continue
		}
		err := s.removeSnapshot(ctx, m.ID)
		switch {
		case errors.Is(err, errdefs.ErrConflict), errors.Is(err, errdefs.ErrNotFound): // somebody was faster
		case err != nil:
			return err
		default:
			s.cfg.Log("snapshot %s has expired", m.ID)
		}
	}
	return s.forgetFailed(ctx, now)
}

// forgetFailed forgets captures that failed so long ago that whoever waited for them
// knows. What has files stays.
func (s *Service) forgetFailed(ctx context.Context, now time.Time) error {
	rows, err := s.cfg.Journal.ListSnapshots(ctx)
	if err != nil {
		return err
	}
	for _, row := range rows {
		if row.Status != string(SnapshotFailed) || now.Sub(row.CreatedAt) < keepEnded {
			continue
		}
		if _, err := s.cfg.Store.Get(row.ID); !errors.Is(err, errdefs.ErrNotFound) {
			continue
		}
		if err := s.cfg.Journal.DeleteSnapshot(ctx, row.ID); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
	}
	return nil
}
