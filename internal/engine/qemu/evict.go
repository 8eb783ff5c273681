package qemu

import "forkd.dev/forkd/internal/engine"

var _ engine.ResidentKeeper = (*Driver)(nil)

// Residents lists the resident images, the largest first.
func (d *Driver) Residents() []engine.Resident { return d.images.List(d.mapped()) }

// mapped counts the machines that map the image of each snapshot.
func (d *Driver) mapped() map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := map[string]int{}
	for _, m := range d.machines {
		out[m.rec.MappedID]++
	}
	return out
}
