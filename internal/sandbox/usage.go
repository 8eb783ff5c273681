package sandbox

import (
	"context"
	"io/fs"
	"path/filepath"
	"syscall"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/store/snapshot"
)

// DiskUsage is what everything takes on disk and in memory.
type DiskUsage struct {
	Snapshots []SnapshotUse // oldest first
	Images    []Image
	Resident  []engine.Resident // memory images the engine keeps
	Pools     []WarmPool

	SnapshotBytes int64 // of all snapshots together
	ImageBytes    int64
	SandboxBytes  int64 // writable disks, sockets and logs of all machines
	ResidentBytes int64
	OccupiedBytes int64 // memory of all machines, prepared ones too, and resident images
	FreeBytes     int64 // of the data directory's file system
	TotalBytes    int64
	MinFreeBytes  int64 // kept free; 0 if nothing is
}

// SnapshotUse is one snapshot's part of the disk.
type SnapshotUse struct {
	Snapshot      Snapshot
	OwnBytes      int64 // goes with it
	SharedBytes   int64 // of its ancestors
	ResidentBytes int64
	Dependents    int
	Prepared      int // machines made ahead of forks
}

// DiskUsage adds up what is stored.
func (s *Service) DiskUsage(ctx context.Context) (DiskUsage, error) {
	var out DiskUsage
	var err error
	if out.Images, err = s.Images(ctx); err != nil {
		return out, err
	}
	for _, img := range out.Images {
		out.ImageBytes += img.Bytes
	}
	if k, ok := s.cfg.Engine.(engine.ResidentKeeper); ok {
		out.Resident = k.Residents()
	}
	for _, r := range out.Resident {
		out.ResidentBytes += r.Bytes
	}
	if out.Pools, err = s.WarmPools(ctx); err != nil {
		return out, err
	}
	if err := s.snapshotUse(ctx, &out); err != nil {
		return out, err
	}
	if out.SandboxBytes, err = bytesBelow(s.cfg.Dir); err != nil {
		return out, err
	}
	if m, ok := s.cfg.Engine.(engine.MemoryMeter); ok {
		kib, err := m.OccupiedKiB()
		if err != nil {
			return out, err
		}
		out.OccupiedBytes = kib << 10
	}
	disk, err := linux.ReadDisk(s.cfg.Dir)
	out.FreeBytes, out.TotalBytes, out.MinFreeBytes = disk.AvailableBytes, disk.TotalBytes, max(s.cfg.MinFreeBytes, 0)
	return out, err
}

func (s *Service) snapshotUse(ctx context.Context, out *DiskUsage) error {
	all, err := s.Snapshots(ctx)
	if err != nil {
		return err
	}
	own, parents := map[string]int64{}, map[string]string{}
	for _, m := range s.cfg.Store.List() {
		own[m.ID], parents[m.ID] = ownBytes(m), m.ParentID
		out.SnapshotBytes += own[m.ID]
	}
	resident := map[string]int64{}
	for _, r := range out.Resident {
		resident[r.SnapshotID] += r.Bytes
	}
	prepared := map[string]int{}
	for _, p := range out.Pools {
		prepared[p.SnapshotID] = p.Ready + p.BlankReady
	}
	for _, sn := range all {
		use := SnapshotUse{
			Snapshot: sn, OwnBytes: own[sn.ID], ResidentBytes: resident[sn.ID],
			Dependents: len(s.cfg.Store.Dependents(sn.ID)), Prepared: prepared[sn.ID] + s.spares.count(sn.ID),
		}
		// A chain that was tampered with must not go on for ever.
		for id, left := parents[sn.ID], len(parents); id != "" && left > 0; id, left = parents[id], left-1 {
			use.SharedBytes += own[id]
		}
		out.Snapshots = append(out.Snapshots, use)
	}
	return nil
}

// ownBytes is the disk space of what a snapshot adds to its parent.
func ownBytes(m snapshot.Manifest) int64 {
	var sum int64
	for _, a := range m.Artifacts {
		sum += a.Bytes
	}
	return sum
}

// bytesBelow is the disk space of all files below dir. What vanishes meanwhile does
// not count.
func bytesBelow(dir string) (int64, error) {
	var sum int64
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		info, err := e.Info()
		if err != nil {
			return nil
		}
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			sum += st.Blocks * 512
		}
		return nil
	})
	return sum, err
}
