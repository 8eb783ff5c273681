package fake

import (
	"context"
	"slices"
	"sync"

	"forkd.dev/forkd/internal/engine"
)

// pool keeps restored, stopped machines. It is filled in the background.
type pool struct {
	group sync.WaitGroup

	mu sync.Mutex
	// +checklocks:mu
	targets map[string]*target
	// +checklocks:mu
	closed bool
}

type target struct {
	chain   []engine.State
	want    int
	newSpec func() (engine.Spec, error)
	ready   []*Machine
	filling bool
}

// Prepare keeps n prepared machines of the last state of chain.
func (d *Driver) Prepare(chain []engine.State, n int, newSpec func() (engine.Spec, error)) {
	id := chain[len(chain)-1].ID
	p := &d.pool
	p.mu.Lock()
	t := p.targets[id]
	if t == nil {
		t = &target{}
		p.targets[id] = t
	}
	t.chain, t.want, t.newSpec = chain, n, newSpec
	var surplus []*Machine
	if len(t.ready) > n {
		surplus = slices.Clone(t.ready[n:])
		t.ready = t.ready[:n]
	}
	d.fillLocked(t)
	p.mu.Unlock()
	endAll(surplus)
}

// fillLocked starts filling t unless somebody does or nothing is missing.
//
// +checklocks:d.pool.mu
func (d *Driver) fillLocked(t *target) {
	if d.pool.closed || t.filling || len(t.ready) >= t.want {
		return
	}
	t.filling = true
	d.pool.group.Go(func() {
		for d.fillOne(t) {
		}
	})
}

// fillOne prepares one machine; it reports whether another is missing.
func (d *Driver) fillOne(t *target) bool {
	p := &d.pool
	p.mu.Lock()
	chain, newSpec := t.chain, t.newSpec
	if p.closed || len(t.ready) >= t.want {
		t.filling = false
		p.mu.Unlock()
		return false
	}
	p.mu.Unlock()
	spec, err := newSpec()
	var m *Machine
	if err == nil {
		m, err = d.restore(context.Background(), spec, chain)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		t.filling = false // until the next Prepare
		return false
	}
	if p.closed || len(t.ready) >= t.want {
		m.p.end("not needed any more")
	} else {
		t.ready = append(t.ready, m)
	}
	return true
}

// Claim hands out a prepared machine, or nil.
func (d *Driver) Claim(snapshotID string) engine.Machine {
	d.pool.mu.Lock()
	defer d.pool.mu.Unlock()
	t := d.pool.targets[snapshotID]
	for t != nil && len(t.ready) > 0 {
		m := t.ready[0]
		t.ready = t.ready[1:]
		d.fillLocked(t)
		select {
		case <-m.Done(): // it died while it waited
		default:
			return m
		}
	}
	return nil
}

// Pooled counts prepared machines of a snapshot.
func (d *Driver) Pooled(snapshotID string) int {
	d.pool.mu.Lock()
	defer d.pool.mu.Unlock()
	if t := d.pool.targets[snapshotID]; t != nil {
		return len(t.ready)
	}
	return 0
}

func (p *pool) drop(id string) {
	p.mu.Lock()
	t := p.targets[id]
	delete(p.targets, id)
	var machines []*Machine
	if t != nil {
		machines, t.ready, t.want = t.ready, nil, 0
	}
	p.mu.Unlock()
	endAll(machines)
}

// close ends all prepared machines and waits for the workers.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	var machines []*Machine
	for _, t := range p.targets {
		machines = append(machines, t.ready...)
		t.ready = nil
	}
	p.mu.Unlock()
	endAll(machines)
	p.group.Wait()
}

func endAll(machines []*Machine) {
	for _, m := range machines {
		m.p.end("not needed any more")
	}
}
