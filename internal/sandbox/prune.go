package sandbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Prune asks to delete the snapshots that fulfil all that is set. At least one of
// Older, Labels and Keep is.
type Prune struct {
	Older  time.Duration     // made longer ago than this
	Labels map[string]string // with these labels; "" stands for any value
	// Keep leaves the youngest of what matches otherwise. It counts only if HasKeep.
	Keep    int
	HasKeep bool
	DryRun  bool // only tell
}

// Pruned is one snapshot that Prune deleted, would delete, or left for a reason.
type Pruned struct {
	Snapshot Snapshot
	Bytes    int64  // that are freed
	Kept     string // why it stays, or ""
}

// Prune deletes snapshots. Built-in ones, checkpoints of sandboxes that are there, and
// whatever is in use, being made, or needed by a snapshot that stays, stay.
func (s *Service) Prune(ctx context.Context, p Prune) ([]Pruned, error) {
	if p.Older <= 0 && len(p.Labels) == 0 && !p.HasKeep {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "prune what? nothing was said"), "give --older 7d, --label KEY=VALUE or --keep N")
	}
	if p.Older < 0 || p.Keep < 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "prune: a negative age or number")
	}
	if err := s.checkOpen(); err != nil {
		return nil, err
	}
	all, err := s.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	slices.Reverse(all) // youngest first, so children before their parents
	all = slices.DeleteFunc(all, func(sn Snapshot) bool { return !p.matches(sn, now) })
	all = all[min(p.Keep, len(all)):]
	var out []Pruned
	gone := map[string]bool{}
	for _, sn := range all {
		one := Pruned{Snapshot: sn, Kept: s.whyKept(sn, gone), Bytes: sn.MemoryBytes + sn.DiskBytes + sn.DeviceBytes}
		if one.Kept == "" && !p.DryRun {
			err := s.removeSnapshot(ctx, sn.ID)
			switch {
			case errors.Is(err, errdefs.ErrConflict):
				one.Kept = err.Error()
			case err != nil && !errors.Is(err, errdefs.ErrNotFound):
				return out, err
			}
		}
		gone[sn.ID] = one.Kept == ""
		out = append(out, one)
	}
	return out, nil
}

func (p Prune) matches(sn Snapshot, now time.Time) bool {
	if p.Older > 0 && now.Sub(sn.CreatedAt) < p.Older {
		return false
	}
	for k, v := range p.Labels {
		if have, ok := sn.Labels[k]; !ok || v != "" && v != have {
			return false
		}
	}
	return true
}

// whyKept tells why a snapshot is not pruned; gone are those that go.
func (s *Service) whyKept(sn Snapshot, gone map[string]bool) string {
	switch {
	case sn.Labels[builtinLabel] != "":
		return "it is built in"
	case sn.Status == SnapshotBuilding || sn.Status == SnapshotWriting:
		return "it is being made"
	case len(s.cfg.Store.Holders(sn.ID)) > 0:
		return "it is in use"
	}
	if of := sn.Labels[labelCheckpointOf]; of != "" {
		if _, err := s.resolve(of); err == nil {
			return "it is a checkpoint of sandbox " + of
		}
	}
	for _, id := range s.cfg.Store.Dependents(sn.ID) {
		if !gone[id] {
			return "snapshot " + id + " needs it"
		}
	}
	return ""
}
