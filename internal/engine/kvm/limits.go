package kvm

import (
	"context"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/limit"
	"forkd.dev/forkd/internal/errdefs"
)

// Defaults of engine.Limits. A monitor has a few threads and a few MiB of its own. The guest's
// memory counts twice: the first write to a page that is a hole in a memory file fills
// the hole too, and both are charged to who writes.
const (
	extraMemoryMiB = 128
	defaultPIDs    = 64
)

// limit puts a started process into the control group of its machine.
func (d *Driver) limit(spec engine.Spec, pid int) error {
	limits := limit.Group(spec.Limits)
	if limits.MemoryBytes == 0 {
		limits.MemoryBytes = int64(2*spec.Shape.MemoryMiB+extraMemoryMiB) << 20
	}
	if limits.PIDs == 0 {
		limits.PIDs = defaultPIDs
	}
	return d.limits.Apply(spec.ID, limits, spec.Limits != (engine.Limits{}), pid)
}

var _ engine.Limiter = (*Driver)(nil)

// Limit gives a machine other limits than it was made with.
func (d *Driver) Limit(_ context.Context, id string, limits engine.Limits) error {
	d.mu.Lock()
	m := d.machines[id]
	d.mu.Unlock()
	if m == nil {
		return errdefs.New(errdefs.ErrNotFound, "limit %s: there is no such machine", id)
	}
	return d.limits.Change(id, limit.Group(limits), m.rec.PID)
}
