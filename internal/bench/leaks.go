package bench

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// ErrLeak tells that the daemon has more of something than before.
var ErrLeak = errors.New("something is left behind")

// The things that are counted. A negative count means that it cannot be seen.
const (
	countProcesses   = "processes"   // the daemon and all below it
	countDescriptors = "descriptors" // of the daemon, without the journal's: a pool of connections with a bound
	countMemfds      = "memfds"      // descriptors of the daemon that are memory files
	countCgroups     = "cgroups"     // of the daemon's sandboxes
	countDirectories = "directories" // of sandboxes
)

// journalFile is how the names of the journal's files start.
const journalFile = "forkd.db"

// Leaks is what was there before and after.
type Leaks struct {
	Before map[string]int `json:"before"`
	After  map[string]int `json:"after"`
	Leaked []string       `json:"leaked"` // names of what there is more of
}

func newLeaks(before, after map[string]int) Leaks {
	l := Leaks{Before: before, After: after, Leaked: []string{}}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if before[name] >= 0 && after[name] > before[name] {
			l.Leaked = append(l.Leaked, name)
		}
	}
	return l
}

func (l Leaks) text() string {
	var parts []string
	for _, name := range l.Leaked {
		parts = append(parts, fmt.Sprintf("%s %d -> %d", name, l.Before[name], l.After[name]))
	}
	return strings.Join(parts, ", ")
}

// inspector counts what a daemon holds.
type inspector struct {
	fs        procfs
	daemon    int    // 0: cannot be seen
	sandboxes string // directory of their directories
	cgroup    string // name of the group that holds theirs, "" if there is none
	cgroups   string // where groups are mounted, "" is the system's
	idle      func() // closes connections to the daemon that are kept for reuse
}

// rss returns the daemon's resident memory in KiB, 0 if it cannot be seen.
func (i *inspector) rss() int64 {
	if i.daemon == 0 {
		return 0
	}
	p, err := i.fs.process(i.daemon)
	if err != nil {
		return 0
	}
	return p.pages * int64(os.Getpagesize()) / 1024
}

// counts counts everything now.
func (i *inspector) counts() map[string]int {
	out := map[string]int{countProcesses: -1, countDescriptors: -1, countMemfds: -1, countCgroups: -1, countDirectories: -1}
	if i.daemon == 0 {
		return out
	}
	if all, err := i.fs.all(); err == nil {
		out[countProcesses] = len(tree(all, i.daemon))
	}
	if links, err := os.ReadDir(i.fs.path(i.daemon, "fd")); err == nil {
		out[countDescriptors], out[countMemfds] = 0, 0
		for _, l := range links {
			// One that was closed meanwhile is no memory file.
			target, _ := os.Readlink(i.fs.path(i.daemon, filepath.Join("fd", l.Name())))
			if strings.HasPrefix(target, "/memfd:") {
				out[countMemfds]++
			}
			if !strings.HasPrefix(filepath.Base(target), journalFile) {
				out[countDescriptors]++
			}
		}
	}
	if entries, err := os.ReadDir(i.sandboxes); err == nil {
		out[countDirectories] = len(entries)
	}
	out[countCgroups] = i.countCgroups()
	return out
}

func (i *inspector) countCgroups() int {
	if i.cgroup == "" {
		return -1
	}
	root := i.cgroups
	if root == "" {
		root = "/sys/fs/cgroup"
	}
	n := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // it ended meanwhile
		}
		if d.IsDir() && filepath.Base(filepath.Dir(path)) == i.cgroup {
			n++
		}
		return nil
	})
	if err != nil {
		return -1
	}
	return n
}

// How long the daemon may take to come to rest, and how it is watched.
const (
	restLimit  = 60 * time.Second
	restStep   = 500 * time.Millisecond
	restSteady = 6 // equal looks in a row
)

// atRest waits until the counts do not change any more, or, with goal, until there
// is no more than that of anything, and returns them. When its time is over it
// returns what there is.
func (i *inspector) atRest(ctx context.Context, goal map[string]int) (map[string]int, error) {
	limit := time.NewTimer(restLimit)
	defer limit.Stop()
	tick := time.NewTicker(restStep)
	defer tick.Stop()
	if i.idle != nil {
		i.idle()
	}
	last, equal := i.counts(), 0
	for i.daemon != 0 {
		if goal != nil && len(newLeaks(goal, last).Leaked) == 0 {
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-limit.C:
			return last, nil
		case <-tick.C:
		}
		now := i.counts()
		if maps.Equal(now, last) {
			equal++
		} else {
			equal = 0
		}
		last = now
		if goal == nil && equal >= restSteady {
			break
		}
	}
	return last, nil
}
