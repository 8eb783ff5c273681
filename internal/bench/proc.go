package bench

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// userHZ is the unit of processor times in /proc on every Linux.
const userHZ = 100

// procfs reads a proc file system, /proc but in tests.
type procfs string

// process is one line of /proc/PID/stat, as far as we need it.
type process struct {
	parent int
	ticks  int64 // processor time, with that of reaped children
	pages  int64 // resident
}

// parseStat reads the content of /proc/PID/stat.
func parseStat(raw []byte) (process, error) {
	// The name in parentheses may hold anything, also parentheses.
	end := bytes.LastIndexByte(raw, ')')
	fields := strings.Fields(string(raw[end+1:]))
	if end < 0 || len(fields) < 22 {
		return process{}, errdefs.New(errdefs.ErrInternal, "stat line %.100q has too few fields", raw)
	}
	var p process
	var errs []error
	number := func(field int) int64 { // as counted in proc(5), from 1; the state is field 3
		v, err := strconv.ParseInt(fields[field-3], 10, 64)
		errs = append(errs, err)
		return v
	}
	p.parent = int(number(4))
	p.ticks = number(14) + number(15) + number(16) + number(17)
	p.pages = number(24)
	return p, errors.Join(errs...)
}

func (fs procfs) path(pid int, name string) string {
	return filepath.Join(string(fs), strconv.Itoa(pid), name)
}

func (fs procfs) process(pid int) (process, error) {
	raw, err := os.ReadFile(fs.path(pid, "stat"))
	if err != nil {
		return process{}, fmt.Errorf("read process %d: %w", pid, err)
	}
	return parseStat(raw)
}

// all reads every process; what ends meanwhile is left out.
func (fs procfs) all() (map[int]process, error) {
	entries, err := os.ReadDir(string(fs))
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	out := map[int]process{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p, err := fs.process(pid); err == nil {
			out[pid] = p
		}
	}
	return out, nil
}

// tree returns root and all processes below it.
func tree(all map[int]process, root int) map[int]process {
	inside := map[int]bool{root: true, 0: false, 1: root == 1}
	var look func(pid, depth int) bool
	look = func(pid, depth int) bool {
		if known, ok := inside[pid]; ok {
			return known
		}
		p, ok := all[pid]
		in := ok && depth < 1000 && look(p.parent, depth+1)
		inside[pid] = in
		return in
	}
	out := map[int]process{}
	for pid, p := range all {
		if look(pid, 0) {
			out[pid] = p
		}
	}
	return out
}

// cpuSeconds returns the processor time of a process and all below it, of the dead
// too as far as they were waited for.
func (fs procfs) cpuSeconds(root int) (float64, error) {
	all, err := fs.all()
	if err != nil {
		return 0, err
	}
	var ticks int64
	for _, p := range tree(all, root) {
		ticks += p.ticks
	}
	return float64(ticks) / userHZ, nil
}

// daemonOf returns the process that started the machine of a sandbox: the daemon.
// It is 0 if that is not a process of this host.
func (fs procfs) daemonOf(machine int, sandbox string) int {
	line, err := os.ReadFile(fs.path(machine, "cmdline"))
	if err != nil || !bytes.Contains(line, []byte(sandbox)) {
		return 0
	}
	p, err := fs.process(machine)
	if err != nil || p.parent <= 1 {
		return 0
	}
	return p.parent
}

// groupOf returns the name of the cgroup in which the daemon keeps those of its
// sandboxes, or "".
func (fs procfs) groupOf(machine int, sandbox string) string {
	raw, err := os.ReadFile(fs.path(machine, "cgroup"))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(raw)) {
		path := strings.TrimSpace(line[strings.LastIndexByte(line, ':')+1:])
		if filepath.Base(path) == sandbox && filepath.Dir(path) != "/" {
			return filepath.Base(filepath.Dir(path))
		}
	}
	return ""
}

// meter reads processor time of the daemon with its machines, and of this process.
type meter struct {
	fs     procfs
	daemon int // 0: not on this host
}

// read returns seconds used up to now, or nil if the daemon cannot be seen.
func (m meter) read() *float64 {
	if m.daemon == 0 {
		return nil
	}
	theirs, err := m.fs.cpuSeconds(m.daemon)
	if err != nil {
		return nil
	}
	self, err := m.fs.process(os.Getpid())
	if err != nil {
		return nil
	}
	return ptr(theirs + float64(self.ticks)/userHZ)
}

// since returns the seconds used since an earlier reading, divided by n.
func (m meter) since(before *float64, n int) *float64 {
	now := m.read()
	if before == nil || now == nil || n == 0 {
		return nil
	}
	return ptr(round((*now-*before)/float64(n), 4))
}
