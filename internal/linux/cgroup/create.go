package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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
	for _, h := range layout.Hierarchies {
		used := slices.DeleteFunc(slices.Clone(controllers), func(c string) bool {
			first, _ := layout.Controller(c)
			return first.Mount != h.Mount
		})
		if len(used) == 0 {
			continue
		}
		if err := g.makeIn(h, used); err != nil {
			return err
		}
	}
	return g.apply(limits)
}

// Change gives an existing group other limits; those that are zero stay. pid, which
// is in the group with all that count, also enters hierarchies that it was not in
// because nothing was limited there. On an error some limits may have changed.
func (g *Group) Change(limits Limits, pid int) error {
	if err := limits.check(); err != nil {
		return err
	}
	layout, err := Describe()
	if err != nil {
		return err
	}
	controllers, err := limits.controllers(layout)
	if err == nil {
		err = g.extend(layout, controllers, pid)
	}
	if err == nil && limits.MemoryBytes > 0 {
		// To raise the limits, that of memory with swap comes first, to lower them last.
		v := strconv.FormatInt(limits.MemoryBytes, 10)
		_ = g.set("memory.memsw.limit_in_bytes", "memory.swap.max", v, "0")
	}
	if err == nil {
		err = g.apply(limits)
	}
	if err != nil {
		return fmt.Errorf("change control group %s: %w", g.Name(), err)
	}
	return nil
}

// extend sees to it that the group has all controllers.
func (g *Group) extend(layout Layout, controllers []string, pid int) error {
	for _, c := range controllers {
		h, ok := layout.Controller(c)
		if !ok {
			continue
		}
		i := slices.IndexFunc(g.dirs, func(d dir) bool {
			return d.version == h.Version && strings.HasPrefix(d.path, filepath.Clean(h.Mount)+"/")
		})
		if i >= 0 {
			if h.Version == 1 {
				continue
			}
			if err := enable(filepath.Dir(filepath.Dir(g.dirs[i].path)), []string{c}); err != nil {
				return err
			}
			if err := enable(filepath.Dir(g.dirs[i].path), []string{c}); err != nil {
				return err
			}
			continue
		}
		if err := g.makeIn(h, []string{c}); err != nil {
			return err
		}
		if err := writeFile(filepath.Join(g.dirs[len(g.dirs)-1].path, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
			return err
		}
	}
	return nil
}

// makeIn makes the group's directory in h for controllers.
func (g *Group) makeIn(h Hierarchy, controllers []string) error {
	base := h.Dir()
	if h.Version == 1 {
		controllers = nil // v1 has them in every group
	} else {
		var err error
		if base, err = delegate(h, controllers); err != nil {
			return err
		}
	}
	parent := filepath.Join(base, g.Parent)
	path := filepath.Join(parent, g.Leaf)
	// The parent may vanish between the steps, when somebody removes the last other
	// group in it.
	for {
		if err := os.Mkdir(parent, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make %s: %w", parent, classify(err))
		}
		if err := enable(parent, controllers); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
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

// delegate finds the group of a v2 hierarchy below which new ones can have
// controllers. It is our own group, if it holds nobody else: the kernel wants
// processes in leaves only, so this one moves into a leaf. Else it is the top of
// the hierarchy, which is exempt from that (and which only root can use).
func delegate(h Hierarchy, controllers []string) (string, error) {
	own := h.Dir()
	if slice, ok := besideService(own, controllers); ok {
		return slice, nil
	}
	err := enable(own, controllers)
	if !errors.Is(err, unix.EBUSY) {
		return own, err
	}
	alone, err := onlyMember(own)
	if err != nil {
		return "", err
	}
	if !alone {
		if h.Own != "/" && enable(h.Mount, controllers) == nil && unix.Access(h.Mount, unix.W_OK) == nil {
			return h.Mount, nil
		}
		return "", errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "control group %s holds other processes, so it cannot hand down controllers", own),
			"start forkd in a group of its own: systemd-run --scope -p Delegate=yes, or a unit with Delegate=yes")
	}
	leaf := filepath.Join(own, daemonLeaf)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("make %s: %w", leaf, classify(err))
	}
	if err := writeFile(filepath.Join(leaf, "cgroup.procs"), strconv.Itoa(os.Getpid())); err != nil {
		return "", err
	}
	return own, enable(own, controllers)
}

// besideService returns the slice of the systemd service whose group is own, if new
// groups can be made there. Inside of the service they would keep it from being
// started again while they live: systemd puts the new process into the service's
// own group, and the kernel refuses that to a group that hands down controllers.
func besideService(own string, controllers []string) (string, bool) {
	if !strings.HasSuffix(own, ".service") {
		return "", false
	}
	slice := filepath.Dir(own)
	if unix.Access(slice, unix.W_OK) != nil || enable(slice, controllers) != nil {
		return "", false
	}
	return slice, true
}

// onlyMember tells whether the group at path holds no process but this one.
func onlyMember(path string) (bool, error) {
	b, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
	if err != nil {
		return false, fmt.Errorf("list processes of %s: %w", path, classify(err))
	}
	members := strings.Fields(string(b))
	return len(members) == 1 && members[0] == strconv.Itoa(os.Getpid()), nil
}

// enable lets the subgroups of dir use controllers.
func enable(dir string, controllers []string) error {
	if len(controllers) == 0 {
		return nil
	}
	file := filepath.Join(dir, "cgroup.subtree_control")
	b, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read %s: %w", file, classify(err))
	}
	have := strings.Fields(string(b))
	for _, c := range controllers {
		if slices.Contains(have, c) {
			continue
		}
		if err := writeFile(file, "+"+c); err != nil {
			return err
		}
	}
	return nil
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
