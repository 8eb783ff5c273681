// Package warm keeps machines that an engine restored ahead of their request.
package warm

import (
	"context"
	"sync"
	"time"

	"forkd.dev/forkd/internal/engine"
)

// Pool keeps machines that were restored ahead of their request: started, device
// state loaded, stopped. They have never run, so they have no identity yet, use
// no CPU and own only their process's own memory. One worker fills it, and only while no
// restore is under way, so that a refill never slows a claim.
type Pool struct {
	restore func(ctx context.Context, spec engine.Spec, chain []engine.State) (engine.Machine, error)
	log     func(format string, args ...any)
	wake    chan struct{}
	done    chan struct{}
	cancel  context.CancelFunc

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
	ready   []engine.Machine
	failed  bool // the last attempt failed: not tried again until the next Prepare
}

// idle is how long no restore may have been under way before the pool is
// refilled. A burst of single forks comes at shorter distances.
const idle = 300 * time.Millisecond

// New starts an empty pool of machines that restore makes. The caller closes it.
func New(restore func(context.Context, engine.Spec, []engine.State) (engine.Machine, error), log func(string, ...any)) *Pool {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Pool{
		restore: restore, log: log, wake: make(chan struct{}, 1), done: make(chan struct{}), cancel: cancel,
		targets: map[string]*target{},
	}
	go func() {
		defer close(p.done)
		p.refill(ctx)
	}()
	return p
}

// Prepare keeps n prepared machines of the last state of chain.
func (p *Pool) Prepare(chain []engine.State, n int, newSpec func() (engine.Spec, error)) {
	id := chain[len(chain)-1].ID
	p.mu.Lock()
	var surplus []engine.Machine
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
	p.endAll(surplus)
	p.kick()
}

// Pooled counts the prepared machines of a snapshot.
func (p *Pool) Pooled(snapshotID string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := p.targets[snapshotID]; t != nil {
		return len(t.ready)
	}
	return 0
}

// Claim hands out a prepared machine of a snapshot, or nil.
func (p *Pool) Claim(id string) engine.Machine {
	defer p.kick()
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.targets[id]
	for t != nil && len(t.ready) > 0 {
		m := t.ready[0]
		t.ready = t.ready[1:]
		select {
		case <-m.Done(): // it died while it waited
		default:
			return m
		}
	}
	return nil
}

// Busy counts restores for requests; the pool rests meanwhile.
func (p *Pool) Busy(delta int) {
	p.mu.Lock()
	p.restoring += delta
	p.mu.Unlock()
	p.kick()
}

func (p *Pool) kick() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// refill is the pool's worker.
func (p *Pool) refill(ctx context.Context) {
	quiet := time.NewTimer(idle)
	defer quiet.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
			quiet.Reset(idle)
			continue
		case <-quiet.C:
		}
		for p.fillOne(ctx) {
			select {
			case <-p.wake: // something happened: wait for quiet again
				quiet.Reset(idle)
			default:
				continue
			}
			break
		}
	}
}

// fillOne prepares one machine where one is missing. It reports whether to go on.
func (p *Pool) fillOne(ctx context.Context) bool {
	id, t, order := p.needy()
	if t == nil || ctx.Err() != nil {
		return false
	}
	spec, err := order.newSpec()
	var m engine.Machine
	if err == nil {
		m, err = p.restore(ctx, spec, order.chain)
	}
	p.mu.Lock()
	kept := err == nil && !p.closed && p.targets[id] == t && len(t.ready) < t.want
	if kept {
		t.ready = append(t.ready, m)
	}
	t.failed = err != nil
	p.mu.Unlock()
	if err != nil {
		p.log("prepare a machine of %s: %v", id, err)
		return false
	}
	if !kept {
		p.endAll([]engine.Machine{m})
	}
	return true
}

// needy returns a target with too few machines, and a copy of it as it is now: the
// next Prepare changes it.
func (p *Pool) needy() (string, *target, target) {
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

// Drop ends the prepared machines of a snapshot.
func (p *Pool) Drop(id string) {
	p.mu.Lock()
	t := p.targets[id]
	delete(p.targets, id)
	var machines []engine.Machine
	if t != nil {
		machines, t.ready, t.want = t.ready, nil, 0
	}
	p.mu.Unlock()
	p.endAll(machines)
}

// Close ends all prepared machines and refuses new ones. It returns when the worker has
// ended.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	var machines []engine.Machine
	for _, t := range p.targets {
		machines = append(machines, t.ready...)
		t.ready = nil
	}
	p.mu.Unlock()
	p.endAll(machines)
	p.cancel()
	<-p.done
}

// endAll kills machines nobody has seen. Their directories are the owner's, who
// finds them without a journal entry.
func (p *Pool) endAll(machines []engine.Machine) {
	for _, m := range machines {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		if err := m.Kill(ctx); err != nil {
			p.log("end prepared machine %s: %v", m.ID(), err)
		}
		cancel()
	}
}
