package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// Limits bound all processes of a group together. Zero means no limit.
type Limits struct {
	MemoryBytes int64 // memory and, where it is counted, swap
	PIDs        int   // processes and threads
	CPUPercent  int   // of one processor: 250 is two and a half
}

// daemonLeaf is where Create moves its own process if v2 demands it.
const daemonLeaf = "forkd-daemon"

const cpuPeriodMicros = 100_000

var nameForm = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)

func checkNames(names ...string) error {
	for _, n := range names {
		if !nameForm.MatchString(n) || n == daemonLeaf {
			return errdefs.New(errdefs.ErrInvalid, "control group name %.140q", n)
		}
	}
	return nil
}

func (l Limits) check() error {
	if l.MemoryBytes < 0 || l.PIDs < 0 || l.CPUPercent < 0 {
		return errdefs.New(errdefs.ErrInvalid, "control group limits %+v: negative", l)
	}
	return nil
}

// controllers returns the controllers a group with these limits uses. Memory and
// processes are counted wherever they can be, limited or not.
func (l Limits) controllers(layout Layout) ([]string, error) {
	var out []string
	for _, c := range []struct {
		name           string
		wanted, needed bool
	}{
		{"memory", true, l.MemoryBytes > 0},
		{"pids", true, l.PIDs > 0},
		{"cpu", false, l.CPUPercent > 0},
	} {
		h, ok := layout.Controller(c.name)
		switch {
		case ok && h.Writable && (c.wanted || c.needed):
			out = append(out, c.name)
		case c.needed && ok:
			return nil, errdefs.WithHint(errdefs.New(errdefs.ErrPermission, "limit %s: no right to make control groups in %s", c.name, h.Dir()),
				"run as root, or under systemd with Delegate=yes")
		case c.needed:
			return nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "limit %s: this host has no such cgroup controller here", c.name),
				"boot with the controller enabled (cgroup_enable=%s), or delegate it: Delegate=yes in the systemd unit", c.name)
		}
	}
	if len(out) == 0 {
		return nil, errdefs.New(errdefs.ErrUnsupported, "no cgroup controller can be used here (mode %s)", layout.Mode)
	}
	return out, nil
}

// Create makes the group parent/leaf with limits in every hierarchy it needs.
// ErrConflict: it exists. ErrUnsupported, ErrPermission: a limit cannot be applied.
func Create(parent, leaf string, limits Limits) (Group, error) {
	g := Group{Parent: parent, Leaf: leaf}
	if err := errors.Join(checkNames(parent, leaf), limits.check()); err != nil {
		return Group{}, err
	}
	layout, err := Describe()
	if err != nil {
		return Group{}, err
	}
	if err := g.create(layout, limits); err != nil {
		for _, d := range g.dirs {
			_ = unix.Rmdir(d.path)
		}
		g.removeParents()
		return Group{}, fmt.Errorf("create control group %s: %w", g.Name(), err)
	}
	return g, nil
}

func (g *Group) create(layout Layout, limits Limits) error {
	controllers, err := limits.controllers(layout)
	if err != nil {
		return err
	}
	for _, c := range controllers {
		h, _ := layout.Controller(c)
		if err := g.use(h, c); err != nil {
			return err
		}
	}
	return g.apply(limits)
}

// use makes the group's directory in h, if it is not there yet, for controller c.
func (g *Group) use(h Hierarchy, c string) error {
	base := h.Dir()
	if h.Version == 2 {
		if filepath.Base(base) == daemonLeaf {
			base = filepath.Dir(base)
		}
		if err := handDown(base, c); err != nil {
			return err
		}
	}
	parent := filepath.Join(base, g.Parent)
	path := filepath.Join(parent, g.Leaf)
	for i := range g.dirs {
		if g.dirs[i].path == path {
			// One hierarchy, a further controller: the parent hands it down, too.
			return handDownV2(h, parent, c)
		}
	}
	// The parent may vanish between the two steps, when somebody removes the last
	// other group in it.
	for {
		if err := os.Mkdir(parent, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make %s: %w", parent, classify(err))
		}
		if err := handDownV2(h, parent, c); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
		err := os.Mkdir(path, 0o755)
		if err == nil {
			g.dirs = append(g.dirs, dir{path: path, version: h.Version})
			return nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			_ = unix.Rmdir(parent) // if it is ours and empty
			return fmt.Errorf("make %s: %w", path, classify(err))
		}
	}
}

func handDownV2(h Hierarchy, dir, controller string) error {
	if h.Version != 2 {
		return nil
	}
	return enable(dir, controller)
}

// handDown lets the subgroups of base use controller. If base holds processes the
// kernel refuses; then this process moves out of the way.
func handDown(base, controller string) error {
	err := enable(base, controller)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	leaf := filepath.Join(base, daemonLeaf)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make %s: %w", leaf, classify(err))
	}
	if err := writeFile(filepath.Join(leaf, "cgroup.procs"), strconv.Itoa(os.Getpid())); err != nil {
		return err
	}
	if err := enable(base, controller); err != nil {
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "control group %s holds other processes, so it cannot hand down %s: %w", base, controller, err),
			"start forkd in a group of its own: systemd-run --scope -p Delegate=yes, or a unit with Delegate=yes")
	}
	return nil
}

func enable(dir, controller string) error {
	file := filepath.Join(dir, "cgroup.subtree_control")
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read %s: %w", file, classify(err))
	}
	for _, have := range strings.Fields(string(b)) {
		if have == controller {
			return nil
		}
	}
	return writeFile(file, "+"+controller)
}

// apply writes the limits into the group's files.
func (g *Group) apply(limits Limits) error {
	if limits.MemoryBytes > 0 {
		v := strconv.FormatInt(limits.MemoryBytes, 10)
		if err := g.set("memory.limit_in_bytes", "memory.max", v, v); err != nil {
			return err
		}
		// Swap accounting is an option of the kernel; without it there is no such file.
		if err := g.set("memory.memsw.limit_in_bytes", "memory.swap.max", v, "0"); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			return err
		}
	}
	if limits.PIDs > 0 {
		v := strconv.Itoa(limits.PIDs)
		if err := g.set("pids.max", "pids.max", v, v); err != nil {
			return err
		}
	}
	if limits.CPUPercent > 0 {
		quota := strconv.Itoa(limits.CPUPercent * (cpuPeriodMicros / 100))
		period := strconv.Itoa(cpuPeriodMicros)
		if _, _, err := g.find("cpu.cfs_period_us", "cpu.cfs_period_us"); err == nil {
			if err := g.set("cpu.cfs_period_us", "cpu.cfs_period_us", period, period); err != nil {
				return err
			}
		}
		return g.set("cpu.cfs_quota_us", "cpu.max", quota, quota+" "+period)
	}
	return nil
}

func (g Group) set(v1File, v2File, v1Value, v2Value string) error {
	path, version, err := g.find(v1File, v2File)
	if err != nil {
		return err
	}
	if version == 2 {
		return writeFile(path, v2Value)
	}
	return writeFile(path, v1Value)
}

// writeFile writes a control file. The kernel takes a value in one write call.
func writeFile(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("set %s: %w", path, classify(err))
	}
	defer f.Close()
	if _, err := f.WriteString(value); err != nil {
		return fmt.Errorf("set %s to %q: %w", path, value, classify(err))
	}
	return nil
}
