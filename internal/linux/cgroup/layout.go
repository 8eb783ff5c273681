package cgroup

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// Mode says which cgroup versions carry resource controllers.
type Mode string

// The modes. In ModeHybrid, v1 hierarchies and a v2 one are mounted side by side.
const (
	ModeV1     Mode = "v1"
	ModeV2     Mode = "v2"
	ModeHybrid Mode = "hybrid"
	ModeNone   Mode = "none"
)

// Hierarchy is one mounted tree of control groups.
type Hierarchy struct {
	Version     int // 1 or 2
	Mount       string
	Own         string // this process's group, relative to Mount: "/" or "/a/b"; new groups go below it
	Controllers []string
	Writable    bool // this process may make groups below its own
}

// Dir is the directory of this process's group.
func (h Hierarchy) Dir() string { return filepath.Join(h.Mount, h.Own) }

// Layout is what control groups this process sees.
type Layout struct {
	Mode        Mode
	Hierarchies []Hierarchy
}

// Controller returns the hierarchy that has controller name.
func (l Layout) Controller(name string) (Hierarchy, bool) {
	for _, h := range l.Hierarchies {
		if slices.Contains(h.Controllers, name) {
			return h, true
		}
	}
	return Hierarchy{}, false
}

// Writable lists those of names whose controllers this process can use.
func (l Layout) Writable(names ...string) []string {
	var out []string
	for _, name := range names {
		if h, ok := l.Controller(name); ok && h.Writable {
			out = append(out, name)
		}
	}
	return out
}

// Describe looks at what is mounted for this process.
func Describe() (Layout, error) {
	mountinfo, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return Layout{}, fmt.Errorf("describe control groups: %w", classify(err))
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return Layout{}, fmt.Errorf("describe control groups: %w", classify(err))
	}
	hierarchies := parseLayout(mountinfo, own)
	for i := range hierarchies {
		h := &hierarchies[i]
		if h.Version == 2 {
			// What Create may have done to this process is none of the caller's business.
			h.Own = filepath.Clean("/" + strings.TrimSuffix(h.Own, daemonLeaf))
			b, err := os.ReadFile(filepath.Join(h.Dir(), "cgroup.controllers"))
			if err != nil {
				continue // not reachable from here: it has nothing for us
			}
			h.Controllers = strings.Fields(string(b))
		}
		h.Writable = unix.Access(h.Dir(), unix.W_OK) == nil
	}
	return Layout{Mode: modeOf(hierarchies), Hierarchies: hierarchies}, nil
}

func modeOf(hierarchies []Hierarchy) Mode {
	var v1, v2 bool
	for _, h := range hierarchies {
		v1 = v1 || h.Version == 1
		v2 = v2 || h.Version == 2
	}
	switch {
	case v1 && v2:
		return ModeHybrid
	case v1:
		return ModeV1
	case v2:
		return ModeV2
	}
	return ModeNone
}

// parseLayout joins the cgroup mounts of /proc/PID/mountinfo with the places of
// /proc/PID/cgroup. A hierarchy mounted more than once counts once.
func parseLayout(mountinfo, own []byte) []Hierarchy {
	places := parseOwn(own)
	var out []Hierarchy
	sc := bufio.NewScanner(bytes.NewReader(mountinfo))
	for sc.Scan() {
		m, ok := parseMount(sc.Text())
		if !ok {
			continue
		}
		place, ok := places.find(m)
		if !ok {
			continue
		}
		rel, ok := below(m.root, place.path)
		if !ok {
			continue
		}
		h := Hierarchy{Version: m.version, Mount: m.point, Own: rel, Controllers: place.controllers}
		if !slices.ContainsFunc(out, func(o Hierarchy) bool {
			return o.Version == h.Version && slices.Equal(o.Controllers, h.Controllers)
		}) {
			out = append(out, h)
		}
	}
	return out
}

type mount struct {
	version     int
	root, point string
	options     []string // of the file system: controllers on v1
}

// parseMount reads a line of mountinfo (proc(5)); ok is false if it is no cgroup mount.
func parseMount(line string) (m mount, ok bool) {
	left, right, found := strings.Cut(line, " - ")
	fields, super := strings.Fields(left), strings.Fields(right)
	if !found || len(fields) < 5 || len(super) < 3 {
		return mount{}, false
	}
	switch super[0] {
	case "cgroup":
		m.version = 1
	case "cgroup2":
		m.version = 2
	default:
		return mount{}, false
	}
	m.root, m.point, m.options = unescape(fields[3]), unescape(fields[4]), strings.Split(super[2], ",")
	return m, true
}

// unescape undoes mountinfo's octal escapes of blank, tab, newline and backslash.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

type place struct {
	controllers []string // empty on v2
	path        string
}

type places []place

// parseOwn reads /proc/PID/cgroup: lines "ID:controllers:path" with absolute paths.
func parseOwn(b []byte) places {
	var out places
	for line := range strings.Lines(string(b)) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 || !strings.HasPrefix(parts[2], "/") {
			continue
		}
		p := place{path: parts[2]}
		if parts[1] != "" {
			p.controllers = strings.Split(parts[1], ",")
		}
		out = append(out, p)
	}
	return out
}

// find returns the place in the hierarchy that m mounts.
func (ps places) find(m mount) (place, bool) {
	for _, p := range ps {
		if m.version == 2 && len(p.controllers) == 0 {
			return p, true
		}
		if m.version == 1 && len(p.controllers) > 0 && !slices.ContainsFunc(p.controllers, func(c string) bool {
			return !slices.Contains(m.options, c)
		}) {
			return p, true
		}
	}
	return place{}, false
}

// below returns path relative to root, with a leading slash. A mount that shows
// another part of the tree has no place for us.
func below(root, path string) (string, bool) {
	if strings.HasPrefix(path, "/..") {
		return "", false
	}
	if root == "/" {
		return filepath.Clean(path), true
	}
	rest, ok := strings.CutPrefix(path, root)
	if !ok || (rest != "" && rest[0] != '/') {
		return "", false
	}
	return filepath.Clean("/" + rest), true
}

func classify(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission):
		return errdefs.As(errdefs.ErrPermission, err)
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.As(errdefs.ErrNotFound, err)
	case errors.Is(err, fs.ErrExist):
		return errdefs.As(errdefs.ErrConflict, err)
	}
	return errdefs.As(errdefs.ErrInternal, err)
}
