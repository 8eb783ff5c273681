package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

var _ engine.MemoryMeter = (*Driver)(nil)

// Usage adds up the machine's processes.
func (m *Machine) Usage(context.Context) (engine.Usage, error) {
	if err := m.check(); err != nil {
		return engine.Usage{}, err
	}
	m.mu.Lock()
	u := engine.Usage{LastActivity: m.lastActivity}
	m.mu.Unlock()
	pids := append([]int{m.rec.PID, m.rec.GoferPID}, children(m.rec.PID)...)
	for i, pid := range pids {
		if sharesMemory(pid, pids[:i]) {
			continue
		}
		mem, err := linux.ReadProcessMemory(pid)
		if errors.Is(err, errdefs.ErrNotFound) && i > 1 {
			continue // a stub that has just ended
		}
		if err != nil {
			return engine.Usage{}, fmt.Errorf("usage of %s: %w", m.rec.ID, err)
		}
		u.PSSKiB += mem.PSSKiB
		u.PrivateKiB += mem.PrivateKiB
		u.RSSKiB += mem.RSSKiB
		if pid == m.rec.PID {
			u.GuestPagesKiB = shmemKiB(pid)
		}
		if cpu, err := linux.CPUTime(pid); err == nil {
			u.CPU += cpu
		}
	}
	return u, nil
}

// sharesMemory tells whether pid has the address space of one of others.
func sharesMemory(pid int, others []int) bool {
	for _, o := range others {
		if linux.SameMemory(pid, o) {
			return true
		}
	}
	return false
}

// shmemKiB is the guest memory that a user-space kernel has mapped and touched.
func shmemKiB(pid int) int64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "RssShmem:"); ok {
			f := strings.Fields(rest)
			if len(f) > 0 {
				n, _ := strconv.ParseInt(f[0], 10, 64)
				return n
			}
		}
	}
	return 0
}

// OccupiedKiB adds up what the user-space kernels and gofers of all machines own,
// guest memory included.
func (d *Driver) OccupiedKiB() (int64, error) {
	var sum int64
	for _, m := range d.all() {
		n, err := m.occupiedKiB()
		if err != nil && m.check() == nil {
			return 0, fmt.Errorf("memory of %s: %w", m.rec.ID, err)
		}
		sum += n
	}
	return sum, nil
}

func (m *Machine) occupiedKiB() (int64, error) {
	var sum int64
	for _, pid := range []int{m.rec.PID, m.rec.GoferPID} {
		n, err := linux.ReadPrivateKiB(pid)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum + shmemKiB(m.rec.PID), nil
}

// stopped tells whether a process stands stopped by a signal.
func stopped(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(rest, "T")
}
