package agent

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// GoRealtime gives every thread of this process real-time priority, so that the
// daemon is answered whatever user programs do, and keeps it from being killed
// for want of memory. Threads made later inherit it. It is for an agent that has
// a machine to itself; a kernel that refuses is reported by the first error.
func GoRealtime() error {
	var first error
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		first = err
	}
	for _, t := range tasks {
		tid, _ := strconv.Atoi(t.Name())
		if err := setPolicy(tid, unix.SCHED_FIFO); err != nil && first == nil {
			first = err
		}
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-1000"), 0); err != nil && first == nil {
		first = err
	}
	return first
}
