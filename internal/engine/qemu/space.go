package qemu

import (
	"context"
	"time"

	"forkd.dev/forkd/internal/engine"
)

// spaceEvery is how often a machine that found the host's disk full tries again.
const spaceEvery = time.Second

var _ engine.Waiter = (*Machine)(nil)

// Waiting says what the guest waits for while it stands still, or "".
func (m *Machine) Waiting() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.noSpace {
		return "the host's disk is full"
	}
	return ""
}

// blockError notes that QEMU stopped the guest because a write found no space. It
// keeps the request, and tries it again when the guest is told to go on.
func (m *Machine) blockError(action string) {
	if action != "stop" {
		return
	}
	m.mu.Lock()
	m.noSpace = true
	m.mu.Unlock()
	select {
	case m.full <- struct{}{}:
	default: // noted already
	}
}

// keepGoing lets the guest go on whenever the host's disk has space again. It
// returns when watch has.
func (m *Machine) keepGoing(ctx context.Context) {
	for {
		select {
		case <-m.full:
			m.d.cfg.Log("machine %s stands still: %s", m.rec.ID, m.Waiting())
		case <-m.left:
			return
		}
		tick := time.NewTicker(spaceEvery)
		for m.Waiting() != "" {
			select {
			case <-tick.C:
				m.tryAgain(ctx)
			case <-m.left:
				tick.Stop()
				return
			}
		}
		tick.Stop()
		m.d.cfg.Log("machine %s goes on: the disk has space", m.rec.ID)
	}
}

// tryAgain continues a guest that stands still for want of space. One that has gone
// on since the last time has its space.
func (m *Machine) tryAgain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if m.op.take(ctx) != nil {
		return
	}
	defer m.op.give()
	var st struct {
		Status string `json:"status"`
	}
	if m.paused || m.command(ctx, "query-status", nil, &st) != nil {
		return
	}
	if st.Status == "io-error" {
		_ = m.command(ctx, "cont", nil, nil) // what fails is tried again
		return
	}
	select {
	case <-m.full: // it has just stopped again
		return
	default:
	}
	m.mu.Lock()
	m.noSpace = false
	m.mu.Unlock()
}
