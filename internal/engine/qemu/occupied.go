package qemu

import (
	"errors"

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
	total := d.images.OccupiedKiB() + d.arenas.keptKiB()
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
