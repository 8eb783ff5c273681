package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// Process names one process for as long as the host is up: the kernel reuses
// pids, but not together with the start time. Across reboots it needs [BootID].
type Process struct {
	PID   int
	Start uint64 // clock ticks after boot, field 22 of /proc/PID/stat
}

// ProcessStart returns the start time of pid in clock ticks after boot.
// ErrNotFound: there is no such process.
func ProcessStart(pid int) (uint64, error) {
	st, err := readStat(pid)
	if err != nil {
		return 0, err
	}
	return st.start, nil
}

// Identify returns the process that has pid now.
func Identify(pid int) (Process, error) {
	start, err := ProcessStart(pid)
	if err != nil {
		return Process{}, err
	}
	return Process{PID: pid, Start: start}, nil
}

// Self returns this process.
func Self() (Process, error) { return Identify(os.Getpid()) }

// BootID returns the random id of this boot of the host.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", errdefs.As(errdefs.ErrUnsupported, err))
	}
	return strings.TrimSpace(string(b)), nil
}

// Alive tells whether p runs. A zombie, which only waits for its parent, does not.
func (p Process) Alive() bool {
	st, err := readStat(p.PID)
	return err == nil && st.start == p.Start && st.state != 'Z' && st.state != 'X'
}

// Open returns a handle that stays bound to p even if its pid is reused.
// ErrNotFound: p has ended and was reaped. The caller closes the handle.
func (p Process) Open() (*ProcessHandle, error) {
	fd, err := retryEINTR(func() (int, error) { return unix.PidfdOpen(p.PID, 0) })
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", p.PID, classify(err))
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("open process %d: set nonblocking: %w", p.PID, classify(err))
	}
	h := &ProcessHandle{process: p, file: os.NewFile(uintptr(fd), "pidfd")}
	// The descriptor now pins whoever has the pid, so this look decides who that is.
	start, err := ProcessStart(p.PID)
	if err == nil && start != p.Start {
		err = errdefs.New(errdefs.ErrNotFound, "its pid belongs to another process now")
	}
	if err != nil {
		_ = h.Close()
		return nil, fmt.Errorf("open process %d started at %d: %w", p.PID, p.Start, err)
	}
	return h, nil
}

// Kill sends sig to p. It is no error if p has already ended.
func (p Process) Kill(sig syscall.Signal) error {
	h, err := p.Open()
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer h.Close()
	return h.Signal(sig)
}

// Wait returns nil once p has ended (it may still be a zombie), or the context's error.
func (p Process) Wait(ctx context.Context) error {
	h, err := p.Open()
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer h.Close()
	return h.Wait(ctx)
}

// ProcessHandle is an open process descriptor. Its methods may be called concurrently.
type ProcessHandle struct {
	process Process
	file    *os.File
}

// Process returns which process the handle is bound to.
func (h *ProcessHandle) Process() Process { return h.process }

// Close releases the descriptor. Waiters return with an error.
func (h *ProcessHandle) Close() error { return h.file.Close() }

// Signal sends sig. It is no error if the process has already ended.
func (h *ProcessHandle) Signal(sig syscall.Signal) error {
	conn, err := h.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("signal process %d: %w", h.process.PID, err)
	}
	var sendErr error
	if err := conn.Control(func(fd uintptr) { sendErr = unix.PidfdSendSignal(int(fd), sig, nil, 0) }); err != nil {
		return fmt.Errorf("signal process %d: %w", h.process.PID, err)
	}
	if sendErr != nil && !errors.Is(sendErr, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", h.process.PID, classify(sendErr))
	}
	return nil
}

// Wait returns nil once the process has ended (it may still be a zombie), or the
// context's error. It holds no thread while it waits. One Wait per handle at a
// time: the deadline that ends it early belongs to the handle.
func (h *ProcessHandle) Wait(ctx context.Context) error {
	conn, err := h.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", h.process.PID, err)
	}
	if err := h.file.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("wait for process %d: %w", h.process.PID, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = h.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var pollErr error
	err = conn.Read(func(fd uintptr) bool {
		var ready bool
		ready, pollErr = readable(int(fd))
		return ready || pollErr != nil
	})
	switch {
	case pollErr != nil:
		return fmt.Errorf("wait for process %d: %w", h.process.PID, classify(pollErr))
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("wait for process %d: %w", h.process.PID, ctx.Err())
	case err != nil:
		return fmt.Errorf("wait for process %d: %w", h.process.PID, err)
	}
	return nil
}

// readable looks whether fd can be read without waiting.
func readable(fd int) (bool, error) {
	n, err := retryEINTR(func() (int, error) {
		return unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	})
	return n > 0, err
}

// CPUTime returns the processor time all threads of pid have used, ended ones
// included, children not.
func CPUTime(pid int) (time.Duration, error) {
	if pid <= 0 {
		return 0, errdefs.New(errdefs.ErrInvalid, "cpu time of process %d: no such pid", pid)
	}
	// make_process_cpuclock(pid, CPUCLOCK_SCHED) of linux/posix-timers.h.
	const cpuclockSched = 2
	clock := int32(^uint32(pid)<<3 | cpuclockSched) // the kernel's own encoding, negative by design
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		if errors.Is(err, unix.EINVAL) { // how the kernel says that there is no such process
			return 0, errdefs.New(errdefs.ErrNotFound, "cpu time of process %d: no such process", pid)
		}
		return 0, fmt.Errorf("cpu time of process %d: %w", pid, classify(err))
	}
	return time.Duration(ts.Nano()), nil
}

// SetTHPDisable turns transparent huge pages off for this process and for every
// program it starts from now on (the flag survives fork and exec).
func SetTHPDisable() error {
	if err := unix.Prctl(unix.PR_SET_THP_DISABLE, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("disable transparent huge pages: %w", classify(err))
	}
	return nil
}

type procStat struct {
	state byte
	start uint64
}

func readStat(pid int) (procStat, error) {
	if pid <= 0 {
		return procStat{}, errdefs.New(errdefs.ErrInvalid, "process %d: no such pid", pid)
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return procStat{}, fmt.Errorf("process %d: %w", pid, classify(err))
	}
	st, err := parseStat(b)
	if err != nil {
		return procStat{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return st, nil
}

// parseStat reads /proc/PID/stat. The second field is the program's name in
// brackets, chosen by the process: it may hold blanks and brackets.
func parseStat(b []byte) (procStat, error) {
	const startField = 22 - 3 // counted from the state, which is field 3
	end := bytes.LastIndexByte(b, ')')
	if end < 0 {
		return procStat{}, errdefs.New(errdefs.ErrInternal, "its stat has no name: %.80q", b)
	}
	fields := strings.Fields(string(b[end+1:]))
	if len(fields) <= startField || len(fields[0]) != 1 {
		return procStat{}, errdefs.New(errdefs.ErrInternal, "its stat has %d fields after the name", len(fields))
	}
	start, err := strconv.ParseUint(fields[startField], 10, 64)
	if err != nil {
		return procStat{}, fmt.Errorf("its start time: %w", errdefs.As(errdefs.ErrInternal, err))
	}
	return procStat{state: fields[0][0], start: start}, nil
}
