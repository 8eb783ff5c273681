package agent

import (
	"bytes"
	"context"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// stopper holds user processes still where the kernel has no cgroup freezer: it stops
// every process but the agent itself by a signal. Unlike a frozen process, a stopped
// one tells its parent, and a process that somebody stopped before stays stopped.
type stopper struct {
	self int

	mu sync.Mutex
	// +checklocks:mu
	held map[int]bool // stopped by us
}

func newStopper() *stopper { return &stopper{self: os.Getpid(), held: map[int]bool{}} }

// stopStep is how long to wait for signals to take effect before the next look: the
// kernel tells of no event when a process that is not a child of ours has stopped.
const stopStep = time.Millisecond

// stop stops all processes, also those that are born meanwhile, and returns when
// every one of their threads stands still.
func (s *stopper) stop(ctx context.Context, limit time.Duration) error {
	end := time.Now().Add(limit)
	seen := map[int]bool{}
	for {
		moving := s.stopNew(seen)
		if !moving {
			return nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return errdefs.New(errdefs.ErrTimeout, "processes did not stop in %s", limit)
		}
		time.Sleep(stopStep)
	}
}

// stopNew signals the processes that are not in seen, and tells whether any process
// was new or one that we hold still moves.
func (s *stopper) stopNew(seen map[int]bool) (moving bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, pid := range allProcesses() {
		if pid == s.self {
			continue
		}
		if seen[pid] {
			moving = moving || s.held[pid] && !standsStill(pid)
			continue
		}
		seen[pid] = true
		if standsStill(pid) {
			continue // somebody stopped it, or it is dead
		}
		if syscall.Kill(pid, syscall.SIGSTOP) == nil {
			s.held[pid], moving = true, true
		}
	}
	return moving
}

// let continues one process, all its threads.
func (s *stopper) let(pid int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.letLocked(pid)
}

func (s *stopper) letLocked(pid int) error {
	if !s.held[pid] {
		return nil
	}
	delete(s.held, pid)
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && err != unix.ESRCH {
		return errdefs.New(errdefs.ErrInternal, "continue process %d: %w", pid, err)
	}
	return nil
}

// letAll continues all that were stopped. It may be repeated.
func (s *stopper) letAll() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var first error
	for pid := range s.held {
		if err := s.letLocked(pid); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// allProcesses lists the pids of the machine.
func allProcesses() (pids []int) {
	names, _ := readNames("/proc")
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// standsStill tells whether no thread of a process can run: all are stopped or dead,
// or the process is gone.
func standsStill(pid int) bool {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	tasks, _ := readNames(dir)
	for _, t := range tasks {
		state, _, ok := readStat(dir + "/" + t)
		if ok && !bytes.ContainsRune([]byte("TtZX"), state) {
			return false
		}
	}
	return true
}

// readStat reads the state and the parent of a process or thread by its directory.
func readStat(dir string) (state rune, parent int, ok bool) {
	b, err := readLimited(dir+"/stat", 4<<10)
	if err != nil {
		return 0, 0, false
	}
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]) // a name may hold anything
	if len(f) < 2 {
		return 0, 0, false
	}
	parent, err = strconv.Atoi(string(f[1]))
	return rune(f[0][0]), parent, err == nil
}

// descendants lists the living processes below pid.
func descendants(pid int) (below []int) {
	parents := map[int]int{}
	for _, p := range allProcesses() {
		if state, parent, ok := readStat("/proc/" + strconv.Itoa(p)); ok && state != 'Z' {
			parents[p] = parent
		}
	}
	for p := range parents {
		// A chain of parents ends at a process that is not listed.
		for at, steps := parents[p], 0; at > 0 && steps < len(parents); at, steps = parents[at], steps+1 {
			if at == pid {
				below = append(below, p)
				break
			}
		}
	}
	return below
}
