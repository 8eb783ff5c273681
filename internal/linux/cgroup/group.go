package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// Group is one control group in all hierarchies it has a place in.
type Group struct {
	Parent, Leaf string
	dirs         []dir
}

type dir struct {
	path    string
	version int
}

// Name returns "parent/leaf".
func (g Group) Name() string { return g.Parent + "/" + g.Leaf }

// Dirs lists the group's directories.
func (g Group) Dirs() []string {
	var out []string
	for _, d := range g.dirs {
		out = append(out, d.path)
	}
	return out
}

// Open finds an existing group. ErrNotFound: no hierarchy has it.
func Open(parent, leaf string) (Group, error) {
	if err := checkNames(parent, leaf); err != nil {
		return Group{}, err
	}
	groups, err := List(parent)
	if err != nil {
		return Group{}, err
	}
	for _, g := range groups {
		if g.Leaf == leaf {
			return g, nil
		}
	}
	return Group{}, errdefs.New(errdefs.ErrNotFound, "control group %s/%s: not found", parent, leaf)
}

// List finds all groups below a group named parent, wherever in the hierarchies it
// is, sorted by leaf.
func List(parent string) ([]Group, error) {
	if err := checkNames(parent); err != nil {
		return nil, err
	}
	layout, err := Describe()
	if err != nil {
		return nil, err
	}
	byLeaf := make(map[string]*Group)
	for _, h := range layout.Hierarchies {
		for _, path := range findNamed(h.Mount, parent) {
			leaves, err := os.ReadDir(path)
			if err != nil {
				continue // removed meanwhile
			}
			for _, leaf := range leaves {
				if !leaf.IsDir() || leaf.Name() == daemonLeaf {
					continue
				}
				g := byLeaf[leaf.Name()]
				if g == nil {
					g = &Group{Parent: parent, Leaf: leaf.Name()}
					byLeaf[leaf.Name()] = g
				}
				g.dirs = append(g.dirs, dir{path: filepath.Join(path, leaf.Name()), version: h.Version})
			}
		}
	}
	out := make([]Group, 0, len(byLeaf))
	for _, g := range byLeaf {
		out = append(out, *g)
	}
	slices.SortFunc(out, func(a, b Group) int { return strings.Compare(a.Leaf, b.Leaf) })
	return out, nil
}

// findNamed returns the directories below root that have name; it does not look inside them.
func findNamed(root, name string) []string {
	var out []string
	_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil && e != nil && e.IsDir():
			return fs.SkipDir // removed meanwhile, or not ours to see
		case err != nil || !e.IsDir():
			return nil
		case path != root && e.Name() == name:
			out = append(out, path)
			return fs.SkipDir
		}
		return nil
	})
	return out
}

// AddProcess moves pid, with all its threads, into the group. Its later children
// are born there. The caller sees to it that pid is not reused meanwhile (it is a
// child that was not waited for).
func (g Group) AddProcess(pid int) error {
	for _, d := range g.dirs {
		if err := writeFile(filepath.Join(d.path, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			if errors.Is(err, unix.ESRCH) {
				err = errdefs.As(errdefs.ErrNotFound, err)
			}
			return fmt.Errorf("add process %d to control group %s: %w", pid, g.Name(), err)
		}
	}
	return nil
}

// Procs lists the pids in the group, ascending.
func (g Group) Procs() ([]int, error) {
	seen := make(map[int]bool)
	for _, d := range g.dirs {
		b, err := os.ReadFile(filepath.Join(d.path, "cgroup.procs"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			continue // removed
		}
		if err != nil {
			return nil, fmt.Errorf("list control group %s: %w", g.Name(), classify(err))
		}
		for _, field := range strings.Fields(string(b)) {
			// The kernel shows 0 for a process of a pid namespace we cannot see into.
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				seen[pid] = true
			}
		}
	}
	out := make([]int, 0, len(seen))
	for pid := range seen {
		out = append(out, pid)
	}
	slices.Sort(out)
	return out, nil
}

// MemoryCurrent returns the bytes of memory charged to the group now.
func (g Group) MemoryCurrent() (int64, error) {
	path, _, err := g.find("memory.usage_in_bytes", "memory.current")
	if err != nil {
		return 0, err
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", path, classify(err))
	}
	v, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", path, errdefs.As(errdefs.ErrInternal, err))
	}
	return v, nil
}

// OOMKills counts the processes of the group that the kernel killed because the
// group was out of memory.
func (g Group) OOMKills() (int64, error) {
	path, _, err := g.find("memory.oom_control", "memory.events")
	if err != nil {
		return 0, err
	}
	return readKeyed(path, "oom_kill")
}

// readKeyed reads the value of key from lines "key value".
func readKeyed(path, key string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", path, classify(err))
	}
	defer f.Close()
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		if k, v, ok := strings.Cut(sc.Text(), " "); ok && k == key {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read %s: %w", path, errdefs.As(errdefs.ErrInternal, err))
			}
			return n, nil
		}
	}
	return 0, errdefs.New(errdefs.ErrUnsupported, "read %s: it has no %s", path, key)
}

// find returns the group's control file under its v1 or v2 name.
func (g Group) find(v1Name, v2Name string) (path string, version int, err error) {
	for _, d := range g.dirs {
		name := v1Name
		if d.version == 2 {
			name = v2Name
		}
		path := filepath.Join(d.path, name)
		if _, err := os.Stat(path); err == nil {
			return path, d.version, nil
		}
	}
	return "", 0, errdefs.New(errdefs.ErrNotFound, "control group %s has no %s or %s", g.Name(), v1Name, v2Name)
}

// Kill ends all processes of the group with SIGKILL and returns when none is left,
// or with ctx's error. Processes born meanwhile are killed, too.
func (g Group) Kill(ctx context.Context) error {
	pause := newBackoff()
	for {
		for _, d := range g.dirs {
			// Since Linux 5.14, v2 only. Elsewhere the loop does the same work.
			_ = writeFile(filepath.Join(d.path, "cgroup.kill"), "1")
		}
		pids, err := g.Procs()
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		if err := g.killOnce(ctx, pids); err != nil {
			return fmt.Errorf("kill control group %s: %w", g.Name(), err)
		}
		if err := pause.wait(ctx); err != nil {
			return fmt.Errorf("kill control group %s, processes %v: %w", g.Name(), pids, err)
		}
	}
}

// killOnce kills those of pids that are still in the group and waits for their end.
// A pid can be reused between reading the list and the signal, so each is pinned
// first and the list read again.
func (g Group) killOnce(ctx context.Context, pids []int) error {
	var handles []*linux.ProcessHandle
	defer func() {
		for _, h := range handles {
			_ = h.Close()
		}
	}()
	for _, pid := range pids {
		p, err := linux.Identify(pid)
		if err != nil {
			continue // ended
		}
		h, err := p.Open()
		if errors.Is(err, errdefs.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		handles = append(handles, h)
	}
	still, err := g.Procs()
	if err != nil {
		return err
	}
	var killed []*linux.ProcessHandle
	for _, h := range handles {
		if !slices.Contains(still, h.Process().PID) {
			continue
		}
		if err := h.Signal(unix.SIGKILL); err != nil {
			return err
		}
		killed = append(killed, h)
	}
	for _, h := range killed {
		if err := h.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Remove removes the group; it must have no processes, or be about to have none.
// It waits for that until ctx ends. It may be repeated.
func (g Group) Remove(ctx context.Context) error {
	for _, d := range g.dirs {
		pause := newBackoff()
		for {
			err := unix.Rmdir(d.path)
			if err == nil || errors.Is(err, unix.ENOENT) {
				break
			}
			if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINTR) {
				return fmt.Errorf("remove control group %s: %w", d.path, classify(err))
			}
			if ctxErr := pause.wait(ctx); ctxErr != nil {
				pids, _ := g.Procs()
				return fmt.Errorf("remove control group %s, which has processes %v: %w", d.path, pids, ctxErr)
			}
		}
	}
	g.removeParents()
	return nil
}

// removeParents removes the common parent if this group was the last in it.
func (g Group) removeParents() {
	for _, d := range g.dirs {
		_ = unix.Rmdir(filepath.Dir(d.path))
	}
}

// backoff is for states of a group that v1 has no event for.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{next: time.Millisecond} }

func (b *backoff) wait(ctx context.Context) error {
	const longest = 50 * time.Millisecond
	t := time.NewTimer(b.next)
	defer t.Stop()
	b.next = min(2*b.next, longest)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
