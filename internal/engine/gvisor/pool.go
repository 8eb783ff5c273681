package gvisor

import (
	"context"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
)

// pool keeps sandboxes that were made ahead of their request and hold nothing yet:
// what is left for a claim is to load the state, which its Resume does. They use no
// CPU and own only runsc's own memory. One worker fills it, and only while no
// restore is under way, so that a refill never slows a claim.
type pool struct {
	d    *Driver
	wake chan struct{}
	done chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	targets map[string]*target
	// +checklocks:mu
	restoring int
	// +checklocks:mu
	closed bool
}

// target is what the pool holds for one snapshot.
type target struct {
	chain   []engine.State
	want    int
	newSpec func() (engine.Spec, error)
	ready   []*Machine
	failed  bool // the last attempt failed: not tried again until the next Prepare
}

// poolIdle is how long no restore may have been under way before the pool is
// refilled. A burst of single forks comes at shorter distances.
const poolIdle = 300 * time.Millisecond

func (p *pool) init(d *Driver) {
	p.d = d
	p.targets = map[string]*target{}
	p.wake = make(chan struct{}, 1)
	p.done = make(chan struct{})
	go func() {
		defer close(p.done)
		p.refill(d.ctx)
	}()
}

// Prepare keeps n prepared machines of the last state of chain.
func (d *Driver) Prepare(chain []engine.State, n int, newSpec func() (engine.Spec, error)) {
	id := chain[len(chain)-1].ID
	p := &d.pool
	p.mu.Lock()
	var surplus []*Machine
	t := p.targets[id]
	if t == nil {
		t = &target{}
		p.targets[id] = t
	}
	t.chain, t.want, t.newSpec, t.failed = chain, n, newSpec, false
	if len(t.ready) > n {
		surplus = append(surplus, t.ready[n:]...)
		t.ready = t.ready[:n]
	}
	p.mu.Unlock()
	endAll(surplus)
	p.kick()
}

// Claim hands out a prepared machine, or nil.
func (d *Driver) Claim(snapshotID string) engine.Machine {
	m := d.pool.take(snapshotID)
	if m == nil {
		return nil
	}
	return m
}

// Pooled counts the prepared machines of a snapshot.
func (d *Driver) Pooled(snapshotID string) int {
	d.pool.mu.Lock()
	defer d.pool.mu.Unlock()
	if t := d.pool.targets[snapshotID]; t != nil {
		return len(t.ready)
	}
	return 0
}

func (p *pool) take(id string) *Machine {
	defer p.kick()
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.targets[id]
	for t != nil && len(t.ready) > 0 {
		m := t.ready[0]
		t.ready = t.ready[1:]
		select {
		case <-m.done: // it died while it waited
		default:
			return m
		}
	}
	return nil
}

// busy counts restores for requests; the pool rests meanwhile.
func (p *pool) busy(delta int) {
	p.mu.Lock()
	p.restoring += delta
	p.mu.Unlock()
	p.kick()
}

func (p *pool) kick() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// refill is the pool's worker.
func (p *pool) refill(ctx context.Context) {
	idle := time.NewTimer(poolIdle)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
			idle.Reset(poolIdle)
			continue
		case <-idle.C:
		}
		for p.fillOne(ctx) {
			select {
			case <-p.wake: // something happened: wait for quiet again
				idle.Reset(poolIdle)
			default:
				continue
			}
			break
		}
	}
}

// fillOne prepares one machine where one is missing. It reports whether to go on.
func (p *pool) fillOne(ctx context.Context) bool {
	id, t, order := p.needy()
	if t == nil || ctx.Err() != nil {
		return false
	}
	spec, err := order.newSpec()
	var m *Machine
	if err == nil {
		m, err = p.d.blank(ctx, spec, order.chain)
	}
	p.mu.Lock()
	kept := err == nil && !p.closed && p.targets[id] == t && len(t.ready) < t.want
	if kept {
		t.ready = append(t.ready, m)
	}
	t.failed = err != nil
	p.mu.Unlock()
	if err != nil {
		p.d.cfg.Log("prepare a machine of %s: %v", id, err)
		return false
	}
	if !kept {
		endAll([]*Machine{m})
	}
	return true
}

// needy returns a target with too few machines, and a copy of it as it is now: the
// next Prepare changes it.
func (p *pool) needy() (string, *target, target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.restoring > 0 {
		return "", nil, target{}
	}
	for id, t := range p.targets {
		if len(t.ready) < t.want && !t.failed {
			return id, t, *t
		}
	}
	return "", nil, target{}
}

// drop ends the prepared machines of a snapshot.
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

// close ends all prepared machines and refuses new ones. The worker ends with the
// driver's context.
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
}

// endAll kills machines nobody has seen. Their directories are the owner's, who
// finds them without a journal entry.
func endAll(machines []*Machine) {
	for _, m := range machines {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := m.Kill(ctx); err != nil {
			m.d.cfg.Log("end prepared machine %s: %v", m.rec.ID, err)
		}
		cancel()
	}
}

// blank makes a sandbox that the last state of chain can be loaded into.
func (d *Driver) blank(ctx context.Context, spec engine.Spec, chain []engine.State) (*Machine, error) {
	last := chain[len(chain)-1]
	agent, err := d.prepare(spec, chain)
	if err != nil {
		return nil, err
	}
	return d.launch(ctx, spec, launchPlan{command: []string{"create"}, agent: agent, forked: last.ID, load: &last})
}
