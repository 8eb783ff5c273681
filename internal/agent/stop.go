package agent

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// endTime is how long programs may take to end at a shutdown.
const endTime = 2 * time.Second

// endUsers ends all user processes: SIGTERM, and SIGKILL for what is left.
func (a *Agent) endUsers() {
	a.capture.release()
	all := a.groups.all()
	if all == nil {
		a.procs.killAll()
		return
	}
	for _, pid := range all.processes() {
		syscall.Kill(pid, syscall.SIGTERM)
	}
	if all.awaitEvent(context.Background(), endTime, "populated", 0) != nil {
		all.kill()
		all.awaitEvent(context.Background(), endTime, "populated", 0)
	}
	all.removeAll()
}

// processes lists the pids of the group and all below it.
func (n *group) processes() (pids []int) {
	filepath.WalkDir(n.dir, func(p string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil
		}
		b, _ := os.ReadFile(filepath.Join(p, "cgroup.procs"))
		for f := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// removeAll removes the group and all below it, deepest first.
func (n *group) removeAll() {
	var dirs []string
	filepath.WalkDir(n.dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, p)
		}
		return nil
	})
	for i := len(dirs) - 1; i >= 0; i-- {
		syscall.Rmdir(dirs[i])
	}
}

// killAll kills every process below the agent. Orphans come to the agent, so
// killing its children often enough reaches all of them.
func (p *processes) killAll() {
	end := time.Now().Add(endTime)
	for time.Now().Before(end) {
		pids := ownChildren()
		if len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		p.reapOne()
	}
}

// reapOne waits until some child has ended and collects it.
func (p *processes) reapOne() {
	var info unix.Siginfo
	unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
	p.reap()
}

func ownChildren() (pids []int) {
	tasks, _ := os.ReadDir("/proc/self/task")
	for _, t := range tasks {
		b, _ := os.ReadFile("/proc/self/task/" + t.Name() + "/children")
		for f := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
