package qemu

import (
	"cmp"
	"slices"

	"forkd.dev/forkd/internal/engine"
)

var _ engine.ResidentKeeper = (*Driver)(nil)

// Residents lists the resident images, the largest first.
func (d *Driver) Residents() []engine.Resident {
	mapped := d.mapped()
	r := &d.residents
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]engine.Resident, 0, len(r.images))
	for id, img := range r.images {
		if bytes := img.bytes.Load(); bytes > 0 {
			out = append(out, engine.Resident{SnapshotID: id, Bytes: bytes, Machines: mapped[id]})
		}
	}
	slices.SortFunc(out, func(a, b engine.Resident) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.SnapshotID, b.SnapshotID))
	})
	return out
}

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

// trimResidents closes the images beyond the limit that no machine maps: closing a
// mapped one would free nothing, and the next fork would make a second.
func (d *Driver) trimResidents() {
	if d.residents.maxBytes == 0 {
		return
	}
	for _, img := range d.residents.surplus(d.mapped()) {
		img.drop()
	}
}

// surplus takes the images out that are to go.
func (r *residents) surplus(mapped map[string]int) []*resident {
	r.mu.Lock()
	defer r.mu.Unlock()
	var total int64
	var idle []string
	for id, img := range r.images {
		bytes := img.bytes.Load()
		total += bytes
		if bytes > 0 && img.pins == 0 && mapped[id] == 0 {
			idle = append(idle, id)
		}
	}
	slices.SortFunc(idle, func(a, b string) int { return cmp.Compare(r.images[a].used, r.images[b].used) })
	var out []*resident
	for _, id := range idle {
		if total <= r.maxBytes {
			break
		}
		total -= r.images[id].bytes.Load()
		out = append(out, r.images[id])
		delete(r.images, id)
	}
	return out
}
