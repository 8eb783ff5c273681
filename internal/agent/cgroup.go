package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// groups is the tree of cgroups that user processes run in. It has no controllers:
// freezing and killing come with every cgroup, and each controller would cost an
// emulated guest something at every switch of tasks.
//
//	user/runner     the warm runner: thawed first in a fork, to be reseeded
//	user/hooks      hooks of a fork, which run while the rest is still frozen
//	user/exec/N     one per exec, so that it can be killed as a whole
//
// Leaves are frozen one by one, because a frozen parent holds all below it.
type groups struct {
	dir string // of "user"; "" without cgroups
	// stopper takes the place of freezing where there are no cgroups; it may be nil.
	stopper *stopper
	runner  *group // these are nil without cgroups
	hooks   *group
	execs   *group

	mu sync.Mutex
	// +checklocks:mu
	closed bool // no exec starts until reopen: execs is frozen, or empty and left as it is
	// +checklocks:mu
	used int // exec groups in use
	// +checklocks:mu
	count int
	// +checklocks:mu
	left []*group // exec groups that still held background processes
}

// group is one cgroup.
type group struct {
	dir    string
	freeze int  // descriptor of cgroup.freeze, or -1: open it when needed
	frozen bool // by us; belongs to who has the turn of a capture
}

func newGroup(dir string) *group {
	n := &group{dir: dir}
	var err error
	if n.freeze, err = unix.Open(dir+"/cgroup.freeze", unix.O_WRONLY|unix.O_CLOEXEC, 0); err != nil {
		n.freeze = -1
	}
	return n
}

// newGroups makes the tree under dir. Without it, or if it cannot be made, user
// processes run ungrouped: they are killed by process group and never frozen.
func newGroups(dir string, log func(string)) *groups {
	g := &groups{}
	if dir == "" {
		return g
	}
	user := filepath.Join(dir, "user")
	for _, d := range []string{user, filepath.Join(user, "runner"), filepath.Join(user, "hooks"), filepath.Join(user, "exec")} {
		if err := os.Mkdir(d, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			log("no cgroups for user processes: " + err.Error())
			return g
		}
	}
	g.dir = user
	g.runner, g.execs = newGroup(filepath.Join(user, "runner")), newGroup(filepath.Join(user, "exec"))
	g.hooks = &group{dir: filepath.Join(user, "hooks"), freeze: -1}
	return g
}

func (g *groups) all() *group {
	if g.dir == "" {
		return nil
	}
	return &group{dir: g.dir, freeze: -1}
}

// close lets no exec start until reopen, and tells whether one may have left
// processes: only then execs has to be frozen.
func (g *groups) close() (used bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.sweepLocked()
	return g.used+len(g.left) > 0
}

func (g *groups) reopen() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = false
}

// sweepLocked removes groups whose background processes have ended meanwhile.
func (g *groups) sweepLocked() {
	var still []*group
	for _, old := range g.left {
		if syscall.Rmdir(old.dir) != nil {
			still = append(still, old)
		}
	}
	g.left = still
}

// newExec makes a group for one exec; errClosed: a capture is under way.
func (g *groups) newExec() (*group, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, errClosed
	}
	if g.dir == "" {
		return nil, nil
	}
	g.sweepLocked()
	g.count++
	n := &group{dir: filepath.Join(g.dir, "exec", strconv.Itoa(g.count)), freeze: -1}
	if err := os.Mkdir(n.dir, 0o755); err != nil {
		return nil, errdefs.New(errdefs.ErrResourceExhausted, "make cgroup for exec: %w", err)
	}
	g.used++
	return n, nil
}

var errClosed = errors.New("groups are closed")

// release gives an exec's group back. One that still has processes stays.
func (g *groups) release(n *group) {
	if n == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.used--
	if syscall.Rmdir(n.dir) != nil {
		g.left = append(g.left, n)
	}
}

func (n *group) open() (*os.File, error) { return os.Open(n.dir) }

func (n *group) write(file, value string) error {
	// Not os.WriteFile: registering the file with the poller costs more than the write.
	fd, err := unix.Open(n.dir+"/"+file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open cgroup file %s: %w", file, err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(value)); err != nil {
		return fmt.Errorf("write cgroup file %s: %w", file, err)
	}
	return nil
}

// kill ends every process of the group, also frozen ones.
func (n *group) kill() {
	if n == nil || n.write("cgroup.kill", "1") == nil {
		return
	}
	b, _ := os.ReadFile(filepath.Join(n.dir, "cgroup.procs"))
	for _, f := range bytes.Fields(b) {
		if pid, err := strconv.Atoi(string(f)); err == nil {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// oomWatch tells whether the kernel has killed processes for want of memory since
// it was last asked. One that nobody asked about counts for the next who asks.
type oomWatch struct{ seen atomic.Int64 }

func (w *oomWatch) happened() bool {
	b, err := os.ReadFile("/proc/vmstat")
	if err != nil {
		return false
	}
	_, rest, found := bytes.Cut(b, []byte("\noom_kill "))
	if !found {
		return false
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	n, err := strconv.ParseInt(string(line), 10, 64)
	return err == nil && w.seen.Swap(n) < n
}

// setFrozen freezes or thaws the group, if it is not already.
func (n *group) setFrozen(on bool) error {
	if n == nil || n.frozen == on {
		return nil
	}
	value := "0"
	if on {
		value = "1"
	}
	if n.freeze < 0 {
		if err := n.write("cgroup.freeze", value); err != nil {
			return err
		}
	} else if _, err := unix.Pwrite(n.freeze, []byte(value), 0); err != nil {
		return fmt.Errorf("write cgroup file cgroup.freeze: %w", err)
	}
	n.frozen = on
	return nil
}

// awaitFrozen waits until every process of the group is frozen.
func (n *group) awaitFrozen(ctx context.Context, limit time.Duration) error {
	if n == nil {
		return nil
	}
	return n.awaitEvent(ctx, limit, "frozen", 1)
}

// awaitEvent waits until key in cgroup.events has the value want. The kernel
// wakes a poll for priority data on that file whenever it changes.
func (n *group) awaitEvent(ctx context.Context, limit time.Duration, key string, want int) error {
	// Not by package os, whose poller would take the descriptor over.
	fd, err := unix.Open(filepath.Join(n.dir, "cgroup.events"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("watch cgroup: %w", err)
	}
	defer unix.Close(fd)
	end := time.Now().Add(limit)
	for {
		// Reading through this descriptor arms its next event.
		var buf [256]byte
		k, err := unix.Pread(fd, buf[:], 0)
		if err != nil {
			return fmt.Errorf("watch cgroup: %w", err)
		}
		if strings.Contains("\n"+string(buf[:k]), "\n"+key+" "+strconv.Itoa(want)+"\n") {
			return nil
		}
		left := time.Until(end)
		if left <= 0 || ctx.Err() != nil {
			return errdefs.New(errdefs.ErrTimeout, "processes of %s did not reach %s %d in %s", filepath.Base(n.dir), key, want, limit)
		}
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}
		if _, err := unix.Poll(fds, int(left.Milliseconds())+1); err != nil && err != unix.EINTR {
			return fmt.Errorf("watch cgroup: %w", err)
		}
	}
}
