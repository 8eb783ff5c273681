package qemu

import (
	"errors"
	"syscall"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

var _ engine.MemoryMeter = (*Driver)(nil)

// OccupiedKiB sums what the machines wrote and the resident images they share. A
// machine that ends meanwhile counts nothing.
func (d *Driver) OccupiedKiB() (int64, error) {
	d.mu.Lock()
	pids := make([]int, 0, len(d.machines))
	for _, m := range d.machines {
		pids = append(pids, m.rec.PID)
	}
	d.mu.Unlock()
	total := d.residents.occupiedKiB()
	for _, pid := range pids {
		kib, err := linux.ReadPrivateKiB(pid)
		if errors.Is(err, errdefs.ErrNotFound) {
			continue
		}
		if err != nil {
			return 0, err
		}
		total += kib
	}
	return total, nil
}

// occupiedKiB sums the pages of the images that are finished.
func (r *residents) occupiedKiB() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	var bytes int64
	for _, img := range r.images {
		bytes += img.bytes.Load()
	}
	return bytes / 1024
}

// measureLocked notes what the finished image occupies; a hole occupies nothing.
func (i *resident) measureLocked() {
	if i.file == nil {
		return
	}
	if st, err := i.file.Stat(); err == nil {
		i.bytes.Store(st.Sys().(*syscall.Stat_t).Blocks * 512)
	}
}
