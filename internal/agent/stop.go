package agent

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
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

// killAll kills every running child with its process group.
func (p *processes) killAll() {
	p.mu.Lock()
	var all []*process
	for _, c := range p.running {
		all = append(all, c)
	}
	p.mu.Unlock()
	for _, c := range all {
		c.kill(syscall.SIGKILL)
	}
	for _, c := range all {
		<-c.done
	}
}
