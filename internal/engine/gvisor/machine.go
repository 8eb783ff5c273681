package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

const recordFile = "machine.json"

// record is machine.json: what Adopt needs to know.
type record struct {
	Version  int          `json:"version"`
	ID       string       `json:"id"`
	BootID   string       `json:"boot_id"`
	PID      int          `json:"pid"` // of the user-space kernel
	Start    uint64       `json:"start"`
	GoferPID int          `json:"gofer_pid"`
	GoferAt  uint64       `json:"gofer_start"`
	UID      int          `json:"uid"`
	Shape    engine.Shape `json:"shape"`
	Tree     string       `json:"tree"`   // path of the image
	Agent    string       `json:"agent"`  // path of the program it runs
	Forked   string       `json:"forked"` // snapshot it was restored from; "" after a boot
	// Captures are the snapshots it was stored as since, oldest first.
	Captures []string `json:"captures,omitempty"`
}

const recordVersion = 1

// Machine is one sandbox. It implements engine.Machine.
type Machine struct {
	d       *Driver
	rec     record
	dir     string
	proc    *linux.ProcessHandle // the user-space kernel
	gofer   *linux.ProcessHandle
	console *console
	done    chan struct{} // closed when the user-space kernel has ended
	left    chan struct{} // closed when watch has returned: also when the driver closed

	op     turn          // held by Pause, Resume, Capture, Kill
	paused bool          // by Pause; guarded by op
	load   *engine.State // what a prepared machine has still to be restored from; guarded by op

	mu sync.Mutex
	// +checklocks:mu
	agent net.Conn // handed out last by DialAgent
	// +checklocks:mu
	reason string
	// +checklocks:mu
	killed bool
	// +checklocks:mu
	lastActivity time.Time
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

// PID returns the process id of the user-space kernel.
func (m *Machine) PID() int { return m.rec.PID }

// Done is closed when the user-space kernel has ended.
func (m *Machine) Done() <-chan struct{} { return m.done }

// Reason says why the machine ended, or "".
func (m *Machine) Reason() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reason
}

// watch waits for the user-space kernel to end and records why. It is the owner of done.
func (m *Machine) watch(ctx context.Context) {
	defer close(m.left)
	if err := m.proc.Wait(ctx); err != nil {
		return // the driver closes; the machine goes on
	}
	defer close(m.done)
	oom := m.d.limits.oomKilled(m.rec.ID)
	m.mu.Lock()
	switch {
	case m.killed:
		m.reason = "killed"
	case oom:
		m.reason = "oom: the host killed it at its memory limit"
	case m.reason == "":
		m.reason = "its user-space kernel (runsc-sandbox) ended"
		if line := lastLine(string(m.console.text())); line != "" {
			m.reason += "; last line of its console: " + line
		}
	}
	m.mu.Unlock()
	m.console.close()
	m.closeConnections()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), goferPatience)
	defer cancel()
	if err := m.endGofer(end); err != nil {
		m.d.cfg.Log("end gofer of %s: %v", m.rec.ID, err)
	}
	_ = m.proc.Close()
	m.d.ended(m)
}

// goferPatience is how long a gofer may take to die.
const goferPatience = 10 * time.Second

func (m *Machine) endGofer(ctx context.Context) error {
	return endProcesses(ctx, []linux.Process{{PID: m.rec.GoferPID, Start: m.rec.GoferAt}})
}

// watchGofer ends the machine if its gofer ends: without it, the next file that is
// not open yet would hang.
func (m *Machine) watchGofer(ctx context.Context) {
	if err := m.gofer.Wait(ctx); err != nil {
		return
	}
	defer m.gofer.Close()
	sentry := linux.Process{PID: m.rec.PID, Start: m.rec.Start}
	if !sentry.Alive() {
		return // it went first, and its gofer with it
	}
	m.mu.Lock()
	if m.reason == "" && !m.killed {
		m.reason = "its file server (runsc-gofer) ended"
	}
	m.mu.Unlock()
	_ = sentry.Kill(unix.SIGKILL)
}

func (m *Machine) closeConnections() {
	m.mu.Lock()
	agent := m.agent
	m.agent = nil
	m.mu.Unlock()
	if agent != nil {
		_ = agent.Close()
	}
}

// check fails if the machine has ended.
func (m *Machine) check() error {
	select {
	case <-m.done:
		return errdefs.New(errdefs.ErrGuest, "machine %s has ended: %s", m.rec.ID, m.Reason())
	default:
		return nil
	}
}

// Pause stops all processes of the machine: first the kernel, which starts the others.
func (m *Machine) Pause(ctx context.Context) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("pause machine %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	if err := m.check(); err != nil {
		return err
	}
	if err := m.freeze(); err != nil {
		return fmt.Errorf("pause machine %s: %w", m.rec.ID, err)
	}
	m.paused = true
	return nil
}

func (m *Machine) freeze() error {
	if err := m.proc.Signal(unix.SIGSTOP); err != nil {
		return err
	}
	return signalAll(children(m.rec.PID), unix.SIGSTOP)
}

func (m *Machine) thaw() error {
	return errors.Join(signalAll(children(m.rec.PID), unix.SIGCONT), m.proc.Signal(unix.SIGCONT))
}

// signalAll signals the children of a process that is stopped or stays: they are not
// reaped meanwhile, so their pids are theirs.
func signalAll(pids []int, sig syscall.Signal) error {
	for _, pid := range pids {
		if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("signal process %d: %w", pid, err)
		}
	}
	return nil
}

// Resume continues the guest. A prepared machine is restored only now.
func (m *Machine) Resume(ctx context.Context) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("resume machine %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	if err := m.check(); err != nil {
		return err
	}
	if m.load != nil {
		if err := m.fill(ctx, *m.load); err != nil {
			return fmt.Errorf("resume machine %s: %w", m.rec.ID, err)
		}
		m.load = nil
	}
	if !m.paused {
		return nil
	}
	if err := m.thaw(); err != nil {
		return fmt.Errorf("resume machine %s: %w", m.rec.ID, err)
	}
	m.paused = false
	return nil
}

// DialAgent opens the agent's pipes. Two readers would share what it says, so the
// connection before is closed.
func (m *Machine) DialAgent(context.Context) (net.Conn, error) {
	m.closeConnections()
	if err := m.check(); err != nil {
		return nil, err
	}
	conn, err := dialPipes(m.dir)
	if err != nil {
		return nil, fmt.Errorf("dial agent of %s: %w", m.rec.ID, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.agent, m.lastActivity = conn, time.Now()
	return conn, nil
}

// Kill ends all processes and waits until they are gone.
func (m *Machine) Kill(ctx context.Context) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("kill machine %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	return m.killLocked(ctx)
}

func (m *Machine) killLocked(ctx context.Context) error {
	fail := func(err error) error { return fmt.Errorf("kill machine %s: %w", m.rec.ID, err) }
	select {
	case <-m.done:
	default:
		m.mu.Lock()
		m.killed = true
		m.mu.Unlock()
		sentry := linux.Process{PID: m.rec.PID, Start: m.rec.Start}
		if err := sentry.Kill(unix.SIGKILL); err != nil {
			return fail(err)
		}
		if err := m.awaitEnd(ctx); err != nil {
			return fail(err)
		}
	}
	if err := m.endGofer(ctx); err != nil {
		return fail(err)
	}
	m.d.removeRecords(m.rec.ID)
	return m.d.limits.free(ctx, m.rec.ID)
}

// awaitEnd waits for the end of the user-space kernel, also if the driver has closed
// and nobody watches it any more.
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

// Console returns the end of what init printed.
func (m *Machine) Console() (io.ReadCloser, error) { return m.console.reader(), nil }

// Parent is the snapshot that the machine was stored as last, or comes from.
func (m *Machine) Parent() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.parentLocked()
}

func (m *Machine) parentLocked() string {
	if n := len(m.rec.Captures); n > 0 {
		return m.rec.Captures[n-1]
	}
	return m.rec.Forked
}

// Stored makes a snapshot that the machine was captured to its parent.
func (m *Machine) Stored(_ context.Context, snapshotID string) error {
	return m.changeCaptures(func(all []string) []string { return append(all, snapshotID) })
}

// forsake forgets a snapshot that the machine was captured to.
func (m *Machine) forsake(snapshotID string) error {
	return m.changeCaptures(func(all []string) []string {
		return slices.DeleteFunc(all, func(id string) bool { return id == snapshotID })
	})
}

func (m *Machine) changeCaptures(change func([]string) []string) error {
	m.mu.Lock()
	before := len(m.rec.Captures)
	m.rec.Captures = change(slices.Clone(m.rec.Captures))
	rec := m.rec
	m.mu.Unlock()
	if len(rec.Captures) == before {
		return nil
	}
	return writeRecord(m.dir, rec)
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
