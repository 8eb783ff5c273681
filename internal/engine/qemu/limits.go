package qemu

import (
	"context"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/limit"
	"forkd.dev/forkd/internal/errdefs"
)

// translationMiB bounds the code that QEMU translates before it starts anew; left
// to itself it takes up to a GiB, as a guest runs more and more different programs.
const translationMiB = 256

// Defaults of engine.Limits. QEMU needs memory for translated code and buffers
// beside the guest's, and a thread per CPU and disk request. The guest's memory
// counts twice: the first write to a page that is a hole in the memory image fills
// the hole too, and both are charged to who writes.
const (
	extraMemoryMiB = translationMiB + 256
	defaultPIDs    = 128
)

// minMemoryLimitMiB is what an idle fork of a small guest has been seen to need,
// with room for its first answer.
const minMemoryLimitMiB = 96

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
