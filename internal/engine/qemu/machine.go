package qemu

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// File names inside a machine's directory.
const (
	recordFile  = "machine.json"
	qmpSocket   = "qmp.sock"
	agentSocket = "agent.sock"
	logFile     = "qemu.log"
)

// record is machine.json: what Adopt needs to know.
type record struct {
	Version   int          `json:"version"`
	ID        string       `json:"id"`
	PID       int          `json:"pid"`
	Start     uint64       `json:"start"`
	BootID    string       `json:"boot_id"`
	UID       int          `json:"uid"`
	Shape     engine.Shape `json:"shape"`
	MappedID  string       `json:"mapped_snapshot"` // whose resident image it maps; "" after a boot
	ForkedID  string       `json:"forked_snapshot"` // it was restored from; "" after a boot
	Disks     int          `json:"disks,omitempty"` // files below them; 0: not known, an older daemon made it
	Overlays  []string     `json:"overlays"`        // its own disk files, topmost last
	Captures  []mark       `json:"captures"`        // that were stored since, oldest first
	Qualifier string       `json:"qualifier"`       // installation the -name carries
}

const recordVersion = 2

// mark is a stored capture: it holds the lowest Overlays of the machine's overlays.
type mark struct {
	Snapshot string `json:"snapshot"`
	Overlays int    `json:"overlays"`
}

// memoryFD is the number of the memory file in every QEMU process: the first
// inherited descriptor (args.go).
const memoryFD = 3

// Machine is one QEMU process. It implements engine.Machine.
type Machine struct {
	d    *Driver
	rec  record
	dir  string
	proc *linux.ProcessHandle
	done chan struct{} // closed when the process has ended
	left chan struct{} // closed when watch has returned: also when the driver closed
	cmd  *exec.Cmd     // nil if adopted

	op     turn          // held by Pause, Resume, Capture, Kill
	paused bool          // by Pause; guarded by op
	full   chan struct{} // receives a token when a write of the guest found no space

	// consoleTurn orders those who empty QEMU's ring, so it is held while one does.
	consoleTurn sync.Mutex
	// +checklocks:consoleTurn
	console []byte

	mu sync.Mutex
	// +checklocks:mu
	qmp *qmpClient
	// +checklocks:mu
	predialed net.Conn // agent connection made before the state was loaded
	// +checklocks:mu
	agent net.Conn // handed out last by DialAgent
	// +checklocks:mu
	adopted bool // the agent's port has seen a connection we did not make
	// +checklocks:mu
	reason string
	// +checklocks:mu
	killed bool
	// +checklocks:mu
	lastActivity time.Time
	// +checklocks:mu
	migrated chan string // receives the status of a state load
	// +checklocks:mu
	restacking, mergeFailed bool // overlays are being merged; the last merge failed
	// +checklocks:mu
	noSpace bool // the guest stands still until the host's disk has space
}

var _ engine.Machine = (*Machine)(nil)

// turn is a mutex that can be waited for with a context.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

func (t turn) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t turn) give() { <-t }

// ID returns the sandbox id.
func (m *Machine) ID() string { return m.rec.ID }

// PID returns the process id of QEMU.
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
	m.closeConnections()
	_ = m.proc.Close()
	m.d.ended(m)
}

func lastLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	last := lines[len(lines)-1]
	return last[:min(len(last), 300)]
}

func (m *Machine) closeConnections() {
	m.mu.Lock()
	qmp, agent := m.qmp, m.predialed
	m.qmp, m.predialed = nil, nil
	m.mu.Unlock()
	if qmp != nil {
		qmp.Close()
	}
	if agent != nil {
		_ = agent.Close()
	}
}

// monitor returns the machine's monitor connection, dialing it if need be.
func (m *Machine) monitor(ctx context.Context) (*qmpClient, error) {
	m.mu.Lock()
	q := m.qmp
	m.mu.Unlock()
	if q != nil {
		select {
		case <-q.done: // broken: dial again
		default:
			return q, nil
		}
	}
	select {
	case <-m.done:
		return nil, errdefs.New(errdefs.ErrGuest, "machine %s has ended: %s", m.rec.ID, m.Reason())
	default:
	}
	q, err := dialQMP(ctx, filepath.Join(m.dir, qmpSocket), m.event)
	if err != nil {
		return nil, fmt.Errorf("machine %s: %w", m.rec.ID, err)
	}
	m.mu.Lock()
	m.qmp = q
	m.mu.Unlock()
	return q, nil
}

// maxReason bounds what a QEMU that its guest took over can say about its end.
const maxReason = 100

// event notes what QEMU reports by itself.
func (m *Machine) event(e qmpEvent) {
	if e.Name == "BLOCK_IO_ERROR" {
		action, _ := e.Data["action"].(string)
		m.blockError(action)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch e.Name {
	case "SHUTDOWN":
		why, _ := e.Data["reason"].(string)
		m.reason = "the guest ended: " + why[:min(len(why), maxReason)]
	case "MIGRATION":
		status, _ := e.Data["status"].(string)
		if (status == "completed" || status == "failed") && m.migrated != nil {
			m.migrated <- status
			m.migrated = nil
		}
	}
}

func (m *Machine) command(ctx context.Context, name string, args any, result any, files ...*os.File) error {
	q, err := m.monitor(ctx)
	if err != nil {
		return err
	}
	if err := q.run(ctx, name, args, result, files...); err != nil {
		return fmt.Errorf("machine %s: %w", m.rec.ID, err)
	}
	return nil
}

// Pause stops the guest.
func (m *Machine) Pause(ctx context.Context) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("pause machine %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	if err := m.command(ctx, "stop", nil, nil); err != nil {
		return err
	}
	m.paused = true
	return nil
}

// Resume continues the guest.
func (m *Machine) Resume(ctx context.Context) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("resume machine %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	m.paused = false
	return m.command(ctx, "cont", nil, nil)
}

// DialAgent connects to the agent's port. QEMU takes one connection at a time, so
// the one before is closed.
func (m *Machine) DialAgent(ctx context.Context) (net.Conn, error) {
	m.mu.Lock()
	conn, old, adopted := m.predialed, m.agent, m.adopted
	m.predialed, m.agent, m.adopted = nil, nil, false
	m.lastActivity = time.Now()
	m.mu.Unlock()
	if old != nil {
		_ = old.Close()
	}
	if conn == nil {
		var err error
		if conn, err = m.dialPort(ctx, adopted); err != nil {
			return nil, fmt.Errorf("dial agent of %s: %w: %w", m.rec.ID, err, errdefs.ErrUnavailable)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.agent = conn
	return conn, nil
}

func (m *Machine) dialPort(ctx context.Context, adopted bool) (net.Conn, error) {
	path := filepath.Join(m.dir, agentSocket)
	if adopted {
		// A port that lost its peer in the middle of a message can stay throttled;
		// one extra close and open releases it.
		c, err := linux.DialUnix(ctx, path)
		if err != nil {
			return nil, err
		}
		_ = c.Close()
	}
	c, err := linux.DialUnix(ctx, path)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Kill ends the process and waits until it is gone.
func (m *Machine) Kill(ctx context.Context) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("kill machine %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	return m.killLocked(ctx)
}

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

// Usage reads the process's consumption from /proc.
func (m *Machine) Usage(context.Context) (engine.Usage, error) {
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
	if ram, err := m.ram(); err == nil {
		if runs, err := linux.PrivatePages(m.rec.PID, ram); err == nil {
			u.GuestPagesKiB = int64(linux.CountPages(runs)) * linux.PageSize / 1024
		}
	}
	m.mu.Lock()
	u.LastActivity = m.lastActivity
	m.mu.Unlock()
	return u, nil
}

// consoleFile keeps what was read of a console for the next daemon.
const consoleFile = "console.log"

// Console returns the end of what the guest printed. QEMU's ring gives each byte
// once, so what was read before is kept here, and in a file for the next daemon.
func (m *Machine) Console() (io.ReadCloser, error) {
	m.consoleTurn.Lock()
	defer m.consoleTurn.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var out string
	args := map[string]any{"device": "console", "size": consoleBytes, "format": "base64"}
	if err := m.command(ctx, "ringbuf-read", args, &out); err != nil {
		return nil, fmt.Errorf("read console: %w", err)
	}
	b, err := base64.StdEncoding.DecodeString(out)
	if err != nil {
		return nil, errdefs.New(errdefs.ErrGuest, "console of %s is not base64", m.rec.ID)
	}
	path := filepath.Join(m.dir, consoleFile)
	if m.console == nil {
		if m.console, err = os.ReadFile(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("read console: %w", err)
		}
	}
	m.console = append(m.console, b...)
	if over := len(m.console) - keptConsole; over > 0 {
		m.console = append(m.console[:0], m.console[over:]...)
	}
	if len(b) > 0 {
		if err := os.WriteFile(path, m.console, 0o600); err != nil {
			return nil, fmt.Errorf("keep console: %w", err)
		}
	}
	return io.NopCloser(strings.NewReader(string(m.console))), nil
}

// ram finds the guest's memory in the process's address space.
func (m *Machine) ram() (linux.Mapping, error) {
	maps, err := linux.Mappings(m.rec.PID)
	if err != nil {
		return linux.Mapping{}, err
	}
	want := uint64(m.rec.Shape.MemoryMiB) << 20
	for _, mp := range maps {
		if strings.HasPrefix(mp.Path, "/memfd:"+memimage.FileName) && mp.End-mp.Start == want {
			return mp, nil
		}
	}
	return linux.Mapping{}, errdefs.New(errdefs.ErrInternal, "machine %s: guest memory not found in process %d", m.rec.ID, m.rec.PID)
}

func writeRecord(dir string, rec record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, recordFile+".tmp")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("write machine record: %w", err)
	}
	if err := os.Rename(tmp, filepath.Join(dir, recordFile)); err != nil {
		return fmt.Errorf("write machine record: %w", err)
	}
	return nil
}

func readRecord(dir string) (record, error) {
	b, err := os.ReadFile(filepath.Join(dir, recordFile))
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, errdefs.New(errdefs.ErrNotFound, "%s has no machine record", dir)
	}
	if err != nil {
		return record{}, fmt.Errorf("read machine record: %w", err)
	}
	var rec record
	if err := json.Unmarshal(b, &rec); err != nil {
		return record{}, errdefs.New(errdefs.ErrCorrupt, "machine record in %s: %v", dir, err)
	}
	if rec.Version != recordVersion {
		return record{}, errdefs.New(errdefs.ErrIncompatible, "machine record in %s has version %d, want %d", dir, rec.Version, recordVersion)
	}
	return rec, nil
}
