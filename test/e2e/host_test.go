package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/ident"
)

// waitUntil repeats check until it gives no error or time is up.
func waitUntil(within time.Duration, check func() error) error {
	deadline := time.NewTimer(within)
	defer deadline.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			return fmt.Errorf("still after %v: %w", within, err)
		}
	}
}

// eventually fails the test unless check gives no error within a generous time.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	if err := waitUntil(endPatience, check); err != nil {
		t.Fatal(err)
	}
}

// process is one process of the host.
type process struct {
	pid  int
	args []string
}

func (p process) String() string {
	return fmt.Sprintf("process %d: %.120s", p.pid, strings.Join(p.args, " "))
}

// arg returns what follows a flag.
func (p process) arg(flag string) string {
	for i, a := range p.args {
		if a == flag && i+1 < len(p.args) {
			return p.args[i+1]
		}
	}
	return ""
}

// processesOf lists the processes that have dir in their arguments or environment.
func processesOf(dir string) []process {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var out []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() || pid == os.Getppid() {
			continue
		}
		args, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil || len(args) == 0 {
			continue
		}
		env, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "environ")) // it may just have ended
		if bytes.Contains(args, []byte(dir)) || bytes.Contains(env, []byte(dir)) {
			out = append(out, process{pid: pid, args: strings.Split(strings.TrimRight(string(args), "\x00"), "\x00")})
		}
	}
	return out
}

// machines maps the ids of the machines below a data directory to their processes.
func machines(data string) map[string]process {
	out := map[string]process{}
	for _, p := range processesOf(data) {
		name := p.arg("-name")
		if id := name[strings.LastIndex(name, "-")+1:]; ident.KindOf(id) == ident.Sandbox {
			out[id] = p
		}
	}
	return out
}

// status returns the fields of /proc/PID/status.
func status(t *testing.T, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(line, ":")
		out[key] = strings.TrimSpace(value)
	}
	return out
}

// leftovers says what still exists of a data directory that nobody serves.
func (w *world) leftovers(data string) error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, p := range processesOf(data) {
		add("%v", p)
	}
	for _, name := range namesIn(filepath.Join(data, "sandboxes")) {
		add("sandbox directory %s", name)
	}
	for _, name := range namesIn(w.tmp) {
		add("temporary file %s", name)
	}
	for _, line := range linesWith("/proc/net/unix", data) {
		add("socket: %s", line)
	}
	for _, line := range linesWith("/proc/self/mountinfo", data) {
		add("mount: %s", line)
	}
	for _, name := range []string{"forkd.sock", "private.sock"} {
		if _, err := os.Lstat(filepath.Join(data, name)); err == nil {
			add("socket file %s", name)
		}
	}
	groups, err := w.controlGroups()
	if err != nil {
		errs = append(errs, err)
	}
	for _, g := range groups {
		add("control group %s", g)
	}
	return errors.Join(errs...)
}

func namesIn(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func linesWith(path, text string) []string {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, text) {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

// controlGroups lists the control groups of the daemon's installation.
func (w *world) controlGroups() ([]string, error) {
	var out []string
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // groups of others come and go under the walk
		}
		if d.IsDir() && w.installation != "" && d.Name() == "forkd-"+w.installation {
			out = append(out, path)
		}
		return nil
	})
	return out, err
}

// learnInstallation finds out how the daemon names its machines and groups.
func (w *world) learnInstallation() error {
	for id, p := range machines(w.data) {
		w.installation = strings.TrimSuffix(strings.TrimPrefix(p.arg("-name"), "forkd-"), "-"+id)
		return nil
	}
	return errors.New("no prepared machine runs")
}
