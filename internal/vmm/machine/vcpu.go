package machine

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/vmm/kvm"
)

// vcpu is a virtual processor and its thread.
type vcpu struct {
	kvm    *kvm.VCPU
	id     int
	live   bool // the thread exists
	tid    atomic.Int32
	stop   atomic.Bool
	exits  atomic.Uint64
	quit   atomic.Bool // the thread ends when it wakes up
	wake   gate
	parked gate // posted once for each wake
}

// gate is a counter that one thread waits for and another posts to. Both sides block in the
// kernel: a goroutine that waits for a channel costs a second thread switch until it has a
// processor again, which counts when a fork takes less than a millisecond.
type gate struct{ fd int }

func newGate() (gate, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return gate{}, fmt.Errorf("make event: %w", err)
	}
	return gate{fd}, nil
}

func (g gate) post() { _, _ = unix.Write(g.fd, one) }

func (g gate) wait() {
	var b [8]byte
	for {
		if _, err := unix.Read(g.fd, b[:]); err != unix.EINTR {
			return
		}
	}
}

func (g gate) close() { _ = unix.Close(g.fd) }

// start lets a parked vCPU run.
func (v *vcpu) start() {
	v.stop.Store(false)
	v.kvm.ClearExit()
	v.wake.post()
}

// kick takes the vCPU out of the guest. The stop flag is set.
func (v *vcpu) kick() {
	v.kvm.RequestExit()
	if tid := v.tid.Load(); tid != 0 {
		_ = unix.Tgkill(os.Getpid(), int(tid), unix.SIGURG)
	}
}

// loop is the goroutine of a vCPU. Its thread ends with it: it may have a system call
// filter of its own.
func (m *Machine) loop(v *vcpu) {
	runtime.LockOSThread()
	v.tid.Store(int32(unix.Gettid()))
	v.parked.post()
	for first := true; ; first = false {
		v.wake.wait()
		if v.quit.Load() {
			return
		}
		if first && m.cfg.OnThread != nil {
			if err := m.cfg.OnThread(); err != nil {
				m.endWith(End{Reason: "confine a vCPU thread: " + err.Error()})
			}
		}
		m.runUntilStopped(v)
		v.parked.post()
	}
}

func (m *Machine) runUntilStopped(v *vcpu) {
	for !v.stop.Load() {
		if !m.step(v) {
			return // ended; stays parked for ever
		}
	}
	// Complete what the guest waits for without letting it run. Each turn either
	// completes a fragment or is told that there is none.
	v.kvm.RequestExit()
	for range maxFragments {
		err := v.kvm.Run()
		if errors.Is(err, kvm.ErrInterrupted) {
			return
		}
		if err != nil || !m.handle(v) {
			return
		}
	}
}

// maxFragments bounds the parts of one instruction's access: a page-crossing repeated
// access of 8 KiB in bytes.
const maxFragments = 8 << 10

// step runs the guest up to its next exit and handles it. false: the machine ended.
func (m *Machine) step(v *vcpu) bool {
	if m.hasEnded() {
		return false
	}
	err := v.kvm.Run()
	if errors.Is(err, kvm.ErrInterrupted) {
		return true
	}
	v.exits.Add(1)
	if err != nil {
		m.endWith(End{Reason: err.Error()})
		return false
	}
	return m.handle(v)
}

// handle serves an exit. false: the machine ended.
func (m *Machine) handle(v *vcpu) bool {
	var err error
	switch v.kvm.ExitReason() {
	case kvm.ExitIO:
		err = m.port(v)
	case kvm.ExitMMIO:
		var a kvm.MMIOAccess
		if a, err = v.kvm.MMIO(); err == nil {
			if a.Write {
				m.mmio.Write(a.Address, a.Data)
			} else {
				m.mmio.Read(a.Address, a.Data)
			}
		}
	case kvm.ExitIntr, kvm.ExitUnknown, kvm.ExitDebug:
	default:
		m.endWith(End{Reason: v.kvm.Details()})
	}
	if err != nil {
		m.endWith(End{Reason: err.Error()})
	}
	return !m.hasEnded()
}

// port serves an access to ports, one repetition after the other.
func (m *Machine) port(v *vcpu) error {
	a, err := v.kvm.Port()
	if err != nil {
		return err
	}
	for data := a.Data; len(data) >= a.Size; data = data[a.Size:] {
		if a.Write {
			m.ports.Write(uint64(a.Port), data[:a.Size])
		} else {
			m.ports.Read(uint64(a.Port), data[:a.Size])
		}
	}
	return nil
}
