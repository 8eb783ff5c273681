package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	forkd "forkd.dev/forkd/sdk/go"
)

// gvisorWorld is a daemon of the gvisor engine with the image of the other one, which
// takes the package manager a minute to make.
func gvisorWorld(t *testing.T) *world {
	t.Helper()
	with := running(t)
	for _, tool := range []string{"runsc", "mkfs.erofs"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("needs %s (make setup): %v", tool, err)
		}
	}
	dir := t.TempDir()
	w := &world{dir: dir, bin: with.bin, data: filepath.Join(dir, "data"), tmp: filepath.Join(dir, "tmp"), settings: []string{"FORKD_ENGINE=gvisor"}}
	if err := os.Mkdir(w.tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"images", "kernels"} {
		if err := linkTree(filepath.Join(with.data, part), filepath.Join(w.data, part)); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if w.addr, err = freeAddress(); err != nil {
		t.Fatal(err)
	}
	if w.client, err = forkd.New(forkd.Options{BaseURL: w.url()}); err != nil {
		t.Fatal(err)
	}
	if err := w.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", w.logTail())
		}
		if err := w.close(); err != nil {
			t.Errorf("left behind: %v", err)
		}
	})
	err = w.await(preparePatience, func(ctx context.Context) error {
		sn, err := w.client.Snapshot(ctx, "py-base")
		if err == nil && !sn.Bootable {
			err = fmt.Errorf("py-base is %s", sn.Status)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// linkTree makes the files of a directory appear in another one.
func linkTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if e.IsDir() {
			if strings.HasPrefix(e.Name(), ".tmp") {
				return fs.SkipDir
			}
			return os.MkdirAll(filepath.Join(to, rel), 0o755)
		}
		return os.Link(path, filepath.Join(to, rel))
	})
}

// kernelsOf maps the sandboxes of a data directory to their user-space kernels.
func kernelsOf(data string) map[string]process {
	out := map[string]process{}
	for _, p := range processesOf(data) {
		if strings.HasPrefix(p.args[0], "runsc-sandbox") {
			out[p.args[len(p.args)-1]] = p
		}
	}
	return out
}

// installationOf finds out how a daemon names its control groups, by those of a process.
func installationOf(t *testing.T, pid int) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(b), "/forkd-")
	if !found {
		t.Fatalf("process %d is in no control group of ours: %s", pid, b)
	}
	name, _, _ := strings.Cut(rest, "/")
	return name
}

// TestGVisor: what is promised of sandboxes holds on a user-space kernel. One daemon
// serves all parts; when it has ended, nothing of it may be left.
func TestGVisor(t *testing.T) {
	w := gvisorWorld(t)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *world)
	}{
		{"forks differ", gvisorForksDiffer},
		{"branches", gvisorBranches},
		{"rollback", gvisorRollback},
		{"programs", gvisorPrograms},
		{"limits", gvisorLimits},
		{"crashes", gvisorCrashes},
	} {
		t.Run(part.name, func(t *testing.T) {
			part.run(t, w)
			w.killAll(t)
		})
	}
}

// gvisorForksDiffer: each fork has numbers, names and a receipt of its own.
func gvisorForksDiffer(t *testing.T, w *world) {
	const n = 10
	seen := map[string]string{}
	boxes := w.fork(t, "py-base", n)
	w.installation = installationOf(t, kernelsOf(w.data)[boxes[0].ID].pid)
	for _, sb := range boxes {
		if sb.Isolation != "user-kernel" || sb.Engine != "gvisor" {
			t.Errorf("%s has engine %s and isolation %s", sb.ID, sb.Engine, sb.Isolation)
		}
		for _, code := range []string{
			"__import__('os').urandom(16).hex()", "__import__('random').random()", "__import__('numpy').random.random()", "__import__('uuid').uuid4()",
			"__import__('socket').gethostname()", "open('/etc/machine-id').read()", "open('/proc/sys/kernel/random/boot_id').read()",
			"open('/run/forkd/token').read()",
		} {
			got := w.eval(t, sb.ID, code)
			if other, taken := seen[code+got]; taken {
				t.Errorf("%s gives %s in %s and %s", code, got, sb.ID, other)
			}
			seen[code+got] = sb.ID
		}
		offset, err := strconv.ParseFloat(w.eval(t, sb.ID, "abs(__import__('time').time() - float(__import__('os').popen('date +%s.%N').read()))"), 64)
		if err != nil || offset > 1 {
			t.Errorf("two clocks of %s are %v apart (%v)", sb.ID, offset, err)
		}
	}
}

// gvisorBranches: a running sandbox is branched, and what comes of it again.
func gvisorBranches(t *testing.T, w *world) {
	source := w.fork(t, "py-base", 1)[0].ID
	w.eval(t, source, "level = 0\nlevel")
	for depth := 1; depth <= 3; depth++ {
		tag := "gvisor-depth-" + strconv.Itoa(depth)
		w.must(t, "branch", source, "--tag", tag)
		child := w.fork(t, tag, 1)[0].ID
		if got := w.eval(t, child, "level"); got != strconv.Itoa(depth-1) {
			t.Errorf("a child at depth %d has level %s", depth, got)
		}
		w.eval(t, child, fmt.Sprintf("level = %d\nlevel", depth))
		w.must(t, "exec", child, "--", "sh", "-c", fmt.Sprintf("echo %d >>/root/levels", depth))
		if got := w.eval(t, source, "level"); got != strconv.Itoa(depth-1) {
			t.Errorf("its source at depth %d has level %s", depth, got)
		}
		source = child
	}
	if got := w.eval(t, source, "open('/root/levels').read()"); got != `'1\n2\n3\n'` {
		t.Errorf("the last one has levels %s", got)
	}
}

// gvisorRollback: again and again, memory, files and processes are as they were.
func gvisorRollback(t *testing.T, w *world) {
	id := w.fork(t, "py-base", 1)[0].ID
	w.eval(t, id, rollbackSetup)
	before := evalJSON[map[string]any](t, w, id, "state()")
	w.must(t, "checkpoint", id)
	for round := range 10 {
		w.eval(t, id, "spoil()")
		w.must(t, "rollback", id)
		after := evalJSON[map[string]any](t, w, id, "state()")
		if fmt.Sprint(after) != fmt.Sprint(before) {
			t.Fatalf("round %d: %v became %v", round, before, after)
		}
	}
}

// gvisorPrograms: a terminal, threads, processes and a database in a file.
func gvisorPrograms(t *testing.T, w *world) {
	id := w.fork(t, "py-base", 1)[0].ID
	for what, code := range map[string]string{
		"pty":             "import pty, os\npid, fd = pty.fork()\nif pid == 0: os.execvp('tty', ['tty'])\nout = os.read(fd, 100); os.waitpid(pid, 0); assert b'/dev/pts/' in out, out",
		"threads":         "from concurrent.futures import ThreadPoolExecutor as T\nwith T(8) as p: assert sum(p.map(lambda x: x*x, range(1000))) == 332833500",
		"multiprocessing": "import multiprocessing, math\nwith multiprocessing.Pool(4) as p: assert p.map(math.factorial, range(5)) == [1, 1, 2, 6, 24]",
		"sqlite":          "import sqlite3\nc = sqlite3.connect('/root/db'); c.execute('create table t (a)'); c.execute('insert into t values (7)'); c.commit(); assert sqlite3.connect('/root/db').execute('select a from t').fetchone() == (7,)",
		"subprocess":      "import subprocess\nassert subprocess.check_output(['sh', '-c', 'echo hello']) == b'hello\\n'",
	} {
		res := w.cli(t, "exec", id, "--", "python3", "-c", code)
		if res.code != 0 {
			t.Errorf("%s: %+v", what, res)
		}
	}
}

// gvisorLimits: a sandbox that eats memory or processes ends, or is refused, by itself.
func gvisorLimits(t *testing.T, w *world) {
	neighbour := w.fork(t, "py-base", 1)[0].ID
	hungry := strings.TrimSpace(w.must(t, "fork", "--tag", "py-base", "-n", "1", "--memory-limit", "256"))
	got := w.cli(t, "eval", hungry, "len(bytearray(1 << 30))")
	if got.code == 0 || !strings.Contains(got.stderr, "oom") {
		t.Errorf("a sandbox beyond its memory: %+v", got)
	}
	bomb := strings.TrimSpace(w.must(t, "fork", "--tag", "py-base", "-n", "1", "--pids-limit", "200"))
	_ = w.cli(t, "exec", "--timeout", "20", bomb, "--", "sh", "-c", "i=0; while [ $i -lt 500 ]; do sleep 100 & i=$((i+1)); done")
	if got := w.eval(t, neighbour, "1+1"); got != "2" {
		t.Errorf("the neighbour says %s", got)
	}
}

// gvisorCrashes: the daemon dies, a user-space kernel dies, a file server dies.
func gvisorCrashes(t *testing.T, w *world) {
	const n = 6
	boxes := w.fork(t, "py-base", n)
	for i, sb := range boxes {
		w.eval(t, sb.ID, fmt.Sprintf("mine = %d\nmine", i))
	}
	w.crash(t)
	w.restart(t)
	for i, sb := range boxes {
		if got := w.eval(t, sb.ID, "mine"); got != strconv.Itoa(i) {
			t.Errorf("after the daemon's end, %s says %s", sb.ID, got)
		}
	}
	killed := map[string]string{boxes[0].ID: "runsc-sandbox", boxes[1].ID: "runsc-gofer"}
	for _, p := range processesOf(w.data) {
		for id, program := range killed {
			if strings.HasPrefix(p.args[0], program) && strings.Contains(strings.Join(p.args, " "), id) {
				if err := syscall.Kill(p.pid, syscall.SIGKILL); err != nil {
					t.Error(err)
				}
			}
		}
	}
	for id, program := range killed {
		eventually(t, func() error {
			sb, err := w.client.Sandbox(t.Context(), id)
			if err == nil && !strings.Contains(sb.Reason, program) {
				err = fmt.Errorf("sandbox %s has reason %q, which does not name %s", id, sb.Reason, program)
			}
			return err
		})
	}
	for i, sb := range boxes[2:] {
		if got := w.eval(t, sb.ID, "mine"); got != strconv.Itoa(i+2) {
			t.Errorf("after the end of others, %s says %s", sb.ID, got)
		}
	}
	if len(kernelsOf(w.data)) < n-2 {
		t.Error(errors.New("user-space kernels are missing"))
	}
}
