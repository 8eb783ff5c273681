package gvisor

import (
	"context"

	"forkd.dev/forkd/internal/engine"
)

// The pool keeps sandboxes that were made ahead of their request and hold nothing yet:
// what is left for a claim is to load the state, which its Resume does. They use no
// CPU and own only runsc's own memory.

// Prepare keeps n prepared machines of the last state of chain.
func (d *Driver) Prepare(chain []engine.State, n int, newSpec func() (engine.Spec, error)) {
	d.pool.Prepare(chain, n, newSpec)
}

// Claim hands out a prepared machine, or nil.
func (d *Driver) Claim(snapshotID string) engine.Machine { return d.pool.Claim(snapshotID) }

// Pooled counts the prepared machines of a snapshot.
func (d *Driver) Pooled(snapshotID string) int { return d.pool.Pooled(snapshotID) }

// blank makes a sandbox that the last state of chain can be loaded into.
func (d *Driver) blank(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error) {
	last := chain[len(chain)-1]
	agent, err := d.prepare(spec, chain)
	if err != nil {
		return nil, err
	}
	m, err := d.launch(ctx, spec, launchPlan{command: []string{"create"}, agent: agent, forked: last.ID, load: &last})
	if err != nil {
		return nil, err
	}
	return m, nil
}
