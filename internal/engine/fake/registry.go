package fake

import (
	"context"
	"slices"
	"sync"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// firstPID is beyond the largest pid of Linux (2^22), so that no real process can
// be meant by a fake one.
const firstPID = 1<<22 + 1

// Registry is a host: the machines that exist, whoever started them. Drivers that
// share one stand for daemons that follow each other.
type Registry struct {
	mu sync.Mutex
	// +checklocks:mu
	processes map[key]*process
	// +checklocks:mu
	nextPID int
}

type key struct{ installation, id string }

// NewRegistry returns an empty host.
func NewRegistry() *Registry {
	return &Registry{processes: map[key]*process{}, nextPID: firstPID}
}

// Running returns the ids of all machines, sorted.
func (r *Registry) Running() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	ids := make([]string, 0, len(r.processes))
	for k := range r.processes {
		ids = append(ids, k.id)
	}
	slices.Sort(ids)
	return ids
}

// Limits returns the limits of machine id, as they are now.
func (r *Registry) Limits(id string) engine.Limits {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, p := range r.processes {
		if k.id == id {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.limits
		}
	}
	return engine.Limits{}
}

// Crash ends machine id as from outside: the driver is not asked. It reports
// whether there was one.
func (r *Registry) Crash(id, reason string) bool {
	r.mu.Lock()
	var found *process
	for k, p := range r.processes {
		if k.id == id {
			found = p
		}
	}
	r.mu.Unlock()
	if found != nil {
		found.end(reason)
	}
	return found != nil
}

// Disconnect closes all connections to agents, as the end of a daemon does.
func (r *Registry) Disconnect() {
	r.mu.Lock()
	var all []*process
	for _, p := range r.processes {
		all = append(all, p)
	}
	r.mu.Unlock()
	for _, p := range all {
		p.mu.Lock()
		c := p.conn
		p.conn = nil
		p.wakeLocked()
		p.mu.Unlock()
		if c != nil {
			_ = c.Close()
		}
	}
}

// start makes a process. ErrConflict: machine id runs already.
func (r *Registry) start(installation, id string, shape engine.Shape, mapped string, c content, faults GuestFaults) (*process, error) {
	p := &process{
		registry: r, key: key{installation, id}, shape: shape, mapped: mapped, faults: faults,
		done: make(chan struct{}), turn: make(chan struct{}, 1), content: c, changed: make(chan struct{}),
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.processes[p.key] != nil {
		return nil, errdefs.New(errdefs.ErrConflict, "machine %s runs already", id)
	}
	p.pid = r.nextPID
	r.nextPID++
	r.processes[p.key] = p
	return p, nil
}

func (r *Registry) find(installation, id string) *process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.processes[key{installation, id}]
}

func (r *Registry) all(installation string) []*process {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*process
	for k, p := range r.processes {
		if k.installation == installation {
			out = append(out, p)
		}
	}
	return out
}

func (r *Registry) remove(p *process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.processes[p.key] == p {
		delete(r.processes, p.key)
	}
}

// process is a machine as the host has it, with its guest.
type process struct {
	registry *Registry
	key      key
	pid      int
	shape    engine.Shape
	mapped   string // snapshot it was restored from, or ""
	faults   GuestFaults
	done     chan struct{}
	turn     chan struct{} // held by pause, resume, capture and kill

	mu sync.Mutex
	// +checklocks:mu
	stored []string // captures since, oldest first
	// +checklocks:mu
	limits engine.Limits
	// +checklocks:mu
	content content
	// +checklocks:mu
	running bool
	// +checklocks:mu
	changed chan struct{} // closed and replaced whenever a waiting call should look again
	// +checklocks:mu
	conn *conn
	// +checklocks:mu
	calls int
	// +checklocks:mu
	reason string
	// +checklocks:mu
	ended bool
}

// take waits for the turn. The caller calls give.
func (p *process) take(ctx context.Context) error {
	select {
	case p.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *process) give() { <-p.turn }

// end makes the process end for the reason given; only the first one counts.
func (p *process) end(reason string) {
	p.mu.Lock()
	first := !p.ended
	c := p.conn
	if first {
		p.ended, p.running, p.reason, p.conn = true, false, reason, nil
		p.wakeLocked()
	}
	p.mu.Unlock()
	if !first {
		return
	}
	p.registry.remove(p)
	if c != nil {
		_ = c.Close()
	}
	close(p.done)
}

// +checklocks:p.mu
func (p *process) wakeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// run stops or continues the guest.
func (p *process) run(on running) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return errdefs.New(errdefs.ErrGuest, "machine %s has ended: %s", p.key.id, p.reason)
	}
	p.running = on == goOn
	p.wakeLocked()
	return nil
}

type running int

const (
	stop running = iota
	goOn
)
