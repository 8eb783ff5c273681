package qemu

import (
	"context"

	"forkd.dev/forkd/internal/engine"
)

// Prepare keeps n prepared machines of the last state of chain.
func (d *Driver) Prepare(chain []engine.State, n int, newSpec func() (engine.Spec, error)) {
	d.pool.Prepare(chain, n, newSpec)
}

// Claim hands out a prepared machine, or nil.
func (d *Driver) Claim(snapshotID string) engine.Machine { return d.pool.Claim(snapshotID) }

// Pooled counts the prepared machines of a snapshot.
func (d *Driver) Pooled(snapshotID string) int { return d.pool.Pooled(snapshotID) }

// restoreAhead restores a machine for the pool.
func (d *Driver) restoreAhead(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	m, err := d.restore(ctx, spec, chain)
	if err != nil {
		return nil, err // not a nil *Machine in an interface
	}
	return m, nil
}
