package fake

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
)

// Machine is one driver's hold on a fake machine. It implements engine.Machine.
type Machine struct {
	d *Driver
	p *process
}

var _ engine.Machine = (*Machine)(nil)

// ID returns the sandbox id.
func (m *Machine) ID() string { return m.p.key.id }

// PID returns a number that no process can have.
func (m *Machine) PID() int { return m.p.pid }

// Done is closed when the machine has ended.
func (m *Machine) Done() <-chan struct{} { return m.p.done }

// Reason says why the machine ended, or "".
func (m *Machine) Reason() string {
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	return m.p.reason
}

// Pause stops the guest.
func (m *Machine) Pause(ctx context.Context) error { return m.run(ctx, OpPause, stop) }

// Resume continues the guest.
func (m *Machine) Resume(ctx context.Context) error { return m.run(ctx, OpResume, goOn) }

func (m *Machine) run(ctx context.Context, op Op, on running) error {
	if err := m.p.take(ctx); err != nil {
		return fmt.Errorf("%s %s: %w", op, m.ID(), err)
	}
	defer m.p.give()
	if err := m.d.fault(op, m.ID()); err != nil {
		return fmt.Errorf("%s %s: %w", op, m.ID(), err)
	}
	return m.p.run(on)
}

// Kill ends the machine.
func (m *Machine) Kill(ctx context.Context) error {
	if err := m.p.take(ctx); err != nil {
		return fmt.Errorf("kill %s: %w", m.ID(), err)
	}
	defer m.p.give()
	if err := m.d.fault(OpKill, m.ID()); err != nil {
		return fmt.Errorf("kill %s: %w", m.ID(), err)
	}
	m.p.end("killed")
	return nil
}

// DialAgent connects to the agent; the connection before breaks.
func (m *Machine) DialAgent(ctx context.Context) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("dial agent of %s: %w", m.ID(), err)
	}
	if err := m.d.fault(OpDial, m.ID()); err != nil {
		return nil, fmt.Errorf("dial agent of %s: %w", m.ID(), err)
	}
	c := newConn(m.p)
	m.p.mu.Lock()
	old, ended := m.p.conn, m.p.ended
	if !ended {
		m.p.conn = c
	}
	m.p.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	if ended {
		_ = c.Close()
		return nil, errdefs.New(errdefs.ErrUnavailable, "dial agent of %s: the machine has ended", m.ID())
	}
	return c, nil
}

// Usage invents numbers that grow with what the guest did.
func (m *Machine) Usage(context.Context) (engine.Usage, error) {
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	if m.p.ended {
		return engine.Usage{}, errdefs.New(errdefs.ErrGuest, "usage of %s: the machine has ended", m.ID())
	}
	const own = 1024
	guest := int64(len(m.p.content.Memory)) * layerfmt.DefaultUnitSize / 1024
	disk := int64(0)
	for name, text := range m.p.content.Disk {
		disk += int64(len(name) + len(text))
	}
	return engine.Usage{
		PSSKiB: own + guest, PrivateKiB: own + guest, RSSKiB: own + guest,
		CPU: time.Duration(m.p.calls) * time.Millisecond, DiskBytes: disk, GuestPagesKiB: guest,
	}, nil
}

// Console returns one line.
func (m *Machine) Console() (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("fake guest " + m.ID() + " is up\n")), nil
}
