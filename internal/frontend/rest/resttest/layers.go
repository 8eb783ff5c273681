package resttest

import (
	"context"
	"fmt"
	"slices"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// Damaged is the tag of the snapshot, if there is one, that Verify finds damaged.
const Damaged = "damaged"

// CompactSnapshot implements rest.Layers.
func (s *Service) CompactSnapshot(ctx context.Context, c sandbox.Compact, progress sandbox.Progress) (sandbox.Snapshot, error) {
	sn, err := s.Snapshot(ctx, c.From)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	if progress != nil {
		progress("merging layers", -1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taggedLocked(c.To) >= 0 && !c.Replace {
		return sandbox.Snapshot{}, errdefs.New(errdefs.ErrConflict, "tag %q is taken", c.To)
	}
	s.changes++
	sn.BranchedFrom = "compact:" + sn.ID
	sn.ID, sn.Tags, sn.ParentID, sn.Depth = fmt.Sprintf("sn%020d", len(s.snapshots)+1), []string{c.To}, "", 0
	s.snapshots = append(s.snapshots, sn)
	return sn, nil
}

// RebuildSnapshot implements rest.Layers.
func (s *Service) RebuildSnapshot(ctx context.Context, ref string, progress sandbox.Progress) (sandbox.Snapshot, error) {
	sn, err := s.Snapshot(ctx, ref)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	if sn.BranchedFrom != "" {
		return sandbox.Snapshot{}, errdefs.New(errdefs.ErrUnsupported, "snapshot %s has no recipe", ref)
	}
	if progress != nil {
		progress("booting", 0.1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes++
	i := s.taggedLocked(sn.ID)
	s.snapshots[i].ID = fmt.Sprintf("sn%020d", len(s.snapshots)+100)
	return s.snapshots[i], nil
}

// Verify implements rest.Layers.
func (s *Service) Verify(ctx context.Context, v sandbox.Verify, progress sandbox.Progress) ([]sandbox.Verified, error) {
	all, err := s.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	if v.Snapshot != "" {
		sn, err := s.Snapshot(ctx, v.Snapshot)
		if err != nil {
			return nil, err
		}
		all = []sandbox.Snapshot{sn}
	}
	var out []sandbox.Verified
	for _, sn := range all {
		if progress != nil {
			progress("reading snapshot "+sn.ID, 0.5)
		}
		one := sandbox.Verified{Kind: "snapshot", ID: sn.ID, Bytes: sn.MemoryBytes}
		if len(sn.Tags) > 0 {
			one.Name = sn.Tags[0]
		}
		if slices.Contains(sn.Tags, Damaged) {
			one.Err, one.Marked, one.Rebuild = errdefs.New(errdefs.ErrCorrupt, "artifact memory.layer: it was changed"), v.Repair, "forkd snapshot rebuild "+sn.ID
		}
		out = append(out, one)
	}
	return out, nil
}

// DiskUsage implements rest.Layers.
func (s *Service) DiskUsage(ctx context.Context) (sandbox.DiskUsage, error) {
	all, err := s.Snapshots(ctx)
	if err != nil {
		return sandbox.DiskUsage{}, err
	}
	u := sandbox.DiskUsage{
		Resident:      []engine.Resident{{SnapshotID: all[0].ID, Bytes: 120 << 20, Machines: 3}},
		ResidentBytes: 120 << 20, OccupiedBytes: 200 << 20, SandboxBytes: 5 << 20, FreeBytes: 70 << 30, TotalBytes: 250 << 30, MinFreeBytes: 1 << 30,
	}
	if u.Images, err = s.Images(ctx); err != nil {
		return u, err
	}
	u.ImageBytes = u.Images[0].Bytes
	if u.Pools, err = s.WarmPools(ctx); err != nil {
		return u, err
	}
	for i, sn := range all {
		use := sandbox.SnapshotUse{Snapshot: sn, OwnBytes: sn.MemoryBytes + sn.DiskBytes, Dependents: 0}
		if i == 0 {
			use.ResidentBytes = 120 << 20
		}
		if sn.ParentID != "" {
			use.SharedBytes = all[0].MemoryBytes + all[0].DiskBytes
		}
		u.SnapshotBytes += use.OwnBytes
		u.Snapshots = append(u.Snapshots, use)
	}
	return u, nil
}

// Prune implements rest.Layers: py-base stays, all others match.
func (s *Service) Prune(ctx context.Context, p sandbox.Prune) ([]sandbox.Pruned, error) {
	if p.Older == 0 && len(p.Labels) == 0 && !p.HasKeep {
		return nil, errdefs.New(errdefs.ErrInvalid, "prune what?")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []sandbox.Pruned
	for _, sn := range s.snapshots {
		one := sandbox.Pruned{Snapshot: sn, Bytes: sn.MemoryBytes}
		if slices.Contains(sn.Tags, "py-base") {
			one.Kept = "it is built in"
		}
		out = append(out, one)
	}
	if !p.DryRun {
		s.changes++
		s.snapshots = s.snapshots[:1]
	}
	return out, nil
}
