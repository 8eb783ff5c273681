package kvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmhost"
	"forkd.dev/forkd/internal/vmmwire"
)

// Machine is one forkd-vmm process with a machine in it. It implements engine.Machine.
type Machine struct {
	d    *Driver
	dir  string
	proc *linux.ProcessHandle
	cmd  *exec.Cmd     // nil if adopted
	done chan struct{} // closed when the process has ended
	left chan struct{} // closed when watch has returned: also when the driver closed

	followers sync.WaitGroup // of connections

	op turn // held by Pause, Resume, Capture, Kill

	mu sync.Mutex
	// +checklocks:mu
	rec record
	// +checklocks:mu
	conn *vmmhost.Conn
	// +checklocks:mu
	agent net.Conn // handed out last by DialAgent
	// +checklocks:mu
	reason string
	// +checklocks:mu
	killed bool
	// +checklocks:mu
	lastActivity time.Time
	// +checklocks:mu
	waiting string // what the guest waited for when it was asked last
}

var _ engine.Machine = (*Machine)(nil)

// ID returns the sandbox id.
func (m *Machine) ID() string { return m.rec.ID }

// PID returns the process id of the monitor.
func (m *Machine) PID() int { return m.rec.PID }

// Done is closed when the process has ended.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Reason says why the machine ended, or "".
func (m *Machine) Reason() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reason
}

// watch waits for the process to end and records why. It is the owner of done.
func (m *Machine) watch(ctx context.Context) {
	defer close(m.left)
	if err := m.proc.Wait(ctx); err != nil {
		return // the driver closes; the machine goes on
	}
	defer close(m.done)
	how := "its process ended"
	if m.cmd != nil {
		_ = m.cmd.Wait()
		how = "its process ended: " + m.cmd.ProcessState.String()
		if ws, ok := m.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Exited() && ws.ExitStatus() != 0 {
			if line := lastLine(filepath.Join(m.dir, logFile)); line != "" {
				how += ": " + line
			}
		}
	}
	// What the monitor said about the end comes before the end of its connection.
	m.mu.Lock()
	c := m.conn
	m.mu.Unlock()
	if c != nil {
		<-c.Done()
	}
	m.disconnect()
	m.followers.Wait()
	oom := m.d.limits.OOMKilled(m.rec.ID)
	m.mu.Lock()
	switch {
	case m.killed:
		m.reason = "killed"
	case oom:
		m.reason = "oom: the host killed it at its memory limit"
	case m.reason == "":
		m.reason = how
	}
	m.mu.Unlock()
	_ = m.proc.Close()
	m.d.unclaim(m.rec.Token)
	m.d.ended(m)
}

// disconnect ends the connection to the monitor.
func (m *Machine) disconnect() {
	m.mu.Lock()
	c := m.conn
	m.conn = nil
	m.mu.Unlock()
	if c != nil {
		_ = c.Close()
	}
}

// maxReason bounds what a monitor that its guest took over can say about its end.
const maxReason = 200

// follow waits for the end of a connection to note what the monitor says about the end of its
// machine. A monitor whose machine has ended waits for that.
func (m *Machine) follow(c *vmmhost.Conn) {
	<-c.Done()
	e := c.Ended()
	if e == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reason != "" {
		return
	}
	m.reason = e.Reason[:min(len(e.Reason), maxReason)]
	if e.Guest {
		m.reason = "the guest ended: " + m.reason
	}
}

// monitor returns the machine's connection, dialing it if need be.
func (m *Machine) monitor(ctx context.Context) (*vmmhost.Conn, error) {
	m.mu.Lock()
	c := m.conn
	m.mu.Unlock()
	if c != nil {
		select {
		case <-c.Done(): // broken: dial again
		default:
			return c, nil
		}
	}
	select {
	case <-m.done:
		return nil, errdefs.New(errdefs.ErrGuest, "machine %s has ended: %s", m.rec.ID, m.Reason())
	default:
	}
	c, err := dial(ctx, m.dir)
	if err != nil {
		return nil, fmt.Errorf("machine %s: %w", m.rec.ID, err)
	}
	m.mu.Lock()
	m.conn = c
	m.mu.Unlock()
	m.followers.Go(func() { m.follow(c) })
	return c, nil
}

// request sends a request and returns its reply.
func (m *Machine) request(ctx context.Context, msg vmmwire.Message, list []*os.File) (vmmwire.Message, error) {
	c, err := m.monitor(ctx)
	if err != nil {
		return nil, err
	}
	r, err := c.Call(ctx, msg, list...)
	if err != nil {
		return nil, fmt.Errorf("machine %s: %w", m.rec.ID, err)
	}
	return r, nil
}

// command sends a request that is answered by nothing but success.
func (m *Machine) command(ctx context.Context, msg vmmwire.Message, list ...*os.File) error {
	_, err := m.request(ctx, msg, list)
	return err
}

// Pause stops the guest.
func (m *Machine) Pause(ctx context.Context) error { return m.simple(ctx, "pause", vmmwire.KindPause) }

// Resume continues the guest.
func (m *Machine) Resume(ctx context.Context) error {
	return m.simple(ctx, "resume", vmmwire.KindResume)
}

func (m *Machine) simple(ctx context.Context, verb string, kind vmmwire.Kind) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("%s machine %s: %w", verb, m.rec.ID, err)
	}
	defer m.op.give()
	if err := m.command(ctx, &vmmwire.Simple{Of: kind}); err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return nil
}

// DialAgent connects to the agent's port, in place of the connection before.
func (m *Machine) DialAgent(ctx context.Context) (net.Conn, error) {
	m.mu.Lock()
	old := m.agent
	m.agent = nil
	m.lastActivity = time.Now()
	m.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	select {
	case <-m.done:
		return nil, errdefs.New(errdefs.ErrUnavailable, "dial agent of %s: it has ended: %s", m.rec.ID, m.Reason())
	default:
	}
	conn, err := linux.DialUnix(ctx, filepath.Join(m.dir, agentSocket))
	if err != nil {
		return nil, fmt.Errorf("dial agent of %s: %w: %w", m.rec.ID, err, errdefs.ErrUnavailable)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.agent = conn
	return conn, nil
}

// Kill ends the process and waits until it is gone.
func (m *Machine) Kill(ctx context.Context) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("kill machine %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	return m.killLocked(ctx)
}

// killLocked is Kill for who holds op.
func (m *Machine) killLocked(ctx context.Context) error {
	select {
	case <-m.done:
		return m.d.limits.Free(ctx, m.rec.ID)
	default:
	}
	m.mu.Lock()
	m.killed = true
	m.mu.Unlock()
	if err := m.proc.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("kill machine %s: %w", m.rec.ID, err)
	}
	if err := m.awaitEnd(ctx); err != nil {
		return fmt.Errorf("kill machine %s: %w", m.rec.ID, err)
	}
	return m.d.limits.Free(ctx, m.rec.ID)
}

// awaitEnd waits for the end of the process, also if the driver has closed and
// nobody watches it any more.
func (m *Machine) awaitEnd(ctx context.Context) error {
	select {
	case <-m.done:
		return nil
	case <-m.left:
		select {
		case <-m.done:
			return nil
		default:
			return m.proc.Wait(ctx)
		}
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Usage reads the process's consumption from /proc, and asks the monitor for the guest's
// pages unless the machine is busy.
func (m *Machine) Usage(ctx context.Context) (engine.Usage, error) {
	mem, err := linux.ReadProcessMemory(m.rec.PID)
	if err != nil {
		return engine.Usage{}, fmt.Errorf("usage of %s: %w", m.rec.ID, err)
	}
	cpu, err := linux.CPUTime(m.rec.PID)
	if err != nil {
		return engine.Usage{}, fmt.Errorf("usage of %s: %w", m.rec.ID, err)
	}
	u := engine.Usage{PSSKiB: mem.PSSKiB, PrivateKiB: mem.PrivateKiB, RSSKiB: mem.RSSKiB, CPU: cpu}
	for _, name := range m.overlays() {
		if st, err := os.Stat(filepath.Join(m.dir, name)); err == nil {
			u.DiskBytes += st.Sys().(*syscall.Stat_t).Blocks * 512
		}
	}
	if s := m.stats(ctx); s != nil {
		u.GuestPagesKiB = int64(s.PrivatePages) * linux.PageSize / 1024
	}
	m.mu.Lock()
	u.LastActivity = m.lastActivity
	m.mu.Unlock()
	return u, nil
}

// stats asks the monitor how it is, or returns nil if it has something else to do.
func (m *Machine) stats(ctx context.Context) *vmmwire.Stats {
	select {
	case m.op <- struct{}{}:
		defer m.op.give()
	default:
		return nil
	}
	return m.statsLocked(ctx)
}

// statsLocked is stats for who holds op.
func (m *Machine) statsLocked(ctx context.Context) *vmmwire.Stats {
	r, err := m.request(ctx, &vmmwire.Simple{Of: vmmwire.KindStats}, nil)
	s, ok := r.(*vmmwire.Stats)
	if err != nil || !ok {
		return nil
	}
	m.mu.Lock()
	m.waiting = s.Waiting[:min(len(s.Waiting), maxReason)]
	m.mu.Unlock()
	return s
}

var _ engine.Waiter = (*Machine)(nil)

// Waiting says what the guest waits for while it stands still, or "".
func (m *Machine) Waiting() string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	m.stats(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.waiting
}

// keptConsole is how much of the end of the console is handed out.
const keptConsole = 256 << 10

// Console returns the end of what the guest's kernel printed.
func (m *Machine) Console() (io.ReadCloser, error) {
	f, err := os.Open(filepath.Join(m.dir, consoleFile))
	if err != nil {
		return nil, fmt.Errorf("read console: %w", err)
	}
	if st, err := f.Stat(); err == nil && st.Size() > keptConsole {
		if _, err := f.Seek(-keptConsole, io.SeekEnd); err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("read console: %w", err)
		}
	}
	return f, nil
}

// overlays returns the names of the machine's overlays, topmost last.
func (m *Machine) overlays() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.rec.Overlays...)
}
