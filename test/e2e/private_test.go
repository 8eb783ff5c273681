package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	forkd "forkd.dev/forkd/sdk/go"
)

// alone stops the daemon, so that run and demo start one of their own, on the same
// data directory.
func alone(t *testing.T) *world {
	t.Helper()
	w := running(t)
	w.stop(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	other, err := forkd.New(forkd.Options{Getenv: func(string) string { return "" }})
	if err == nil && other.Health(ctx) == nil {
		t.Skipf("another daemon of this host answers at %s and would be used instead", other.Target())
	}
	return w
}

// private is a command that finds no daemon; it is the leader of a process group,
// as in a terminal.
func (w *world) private(data string, args ...string) *exec.Cmd {
	cmd := exec.Command(w.bin, args...)
	cmd.Env = w.env("FORKD_URL=", "FORKD_DATA_DIR="+data, "XDG_DATA_HOME="+w.tmp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// gone waits until nothing of data is left on the host.
func (w *world) gone(t *testing.T, data string) {
	t.Helper()
	eventually(t, func() error { return w.leftovers(data) })
}

func TestDemoAndRunWithoutDaemon(t *testing.T) {
	w := alone(t)
	got := finish(t, w.private(w.data, "demo", "-n", "3"))
	if got.code != 0 || !strings.Contains(got.stdout, "3/3") || strings.Contains(got.stdout, "NOT UNIQUE") {
		t.Errorf("demo: %+v", got)
	}
	w.gone(t, w.data)
	for script, want := range map[string]outcome{
		"echo hi":                 {0, "hi\n", ""},
		"echo bad >&2; exit 3":    {3, "", "bad\n"},
		"kill -TERM $$":           {143, "", ""},
		"exec /no-such-program-x": {127, "", "no-such-program-x"},
	} {
		got := finish(t, w.private(w.data, "run", "--tag", "py-base", "--", "sh", "-c", script))
		if got.code != want.code || got.stdout != want.stdout || !strings.Contains(got.stderr, want.stderr) {
			t.Errorf("run %q: %+v", script, got)
		}
	}
	if got := finish(t, w.private(w.data, "run", "--tag", "no-such-tag", "--", "true")); got.code != 125 || !strings.Contains(got.stderr, "hint: ") {
		t.Errorf("run of an unknown tag: %+v", got)
	}
	w.gone(t, w.data)
	// What keeps state needs a daemon that stays.
	if got := finish(t, w.private(w.data, "fork", "--tag", "py-base")); got.code != 5 || !strings.Contains(got.stderr, "forkd serve") {
		t.Errorf("fork without a daemon: %+v", got)
	}
}

// TestInterruptedDemo presses Ctrl-C while demo forks.
func TestInterruptedDemo(t *testing.T) {
	w := alone(t)
	cmd := w.private(w.data, "demo", "-n", "100")
	stderr := begin(t, cmd, "forking")
	checkInterrupted(t, cmd, stderr)
	w.gone(t, w.data)
}

// TestInterruptedBuild presses Ctrl-C while the first image is being made.
func TestInterruptedBuild(t *testing.T) {
	w := alone(t)
	data := filepath.Join(w.dir, "interrupted")
	t.Cleanup(func() { _ = os.RemoveAll(data) })
	cmd := w.private(data, "demo", "-n", "2")
	stderr := begin(t, cmd, "install")
	checkInterrupted(t, cmd, stderr)
	w.gone(t, data)
	for _, dir := range []string{"images", "snapshots"} {
		for _, name := range namesIn(filepath.Join(data, dir)) {
			info, err := os.Stat(filepath.Join(data, dir, name))
			if err == nil && info.IsDir() {
				t.Errorf("an interrupted build left %s/%s", dir, name)
			}
		}
	}
}

// TestKilledDemo kills demo: its daemon notices, ends the sandboxes and itself.
func TestKilledDemo(t *testing.T) {
	w := alone(t)
	cmd := w.private(w.data, "demo", "-n", "100")
	stderr := begin(t, cmd, "forking")
	if len(machines(w.data)) == 0 {
		t.Error("no machine runs while demo forks")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	drain(stderr)
	_ = cmd.Wait() // killed
	w.gone(t, w.data)
}

// TestInterruptedCommands presses Ctrl-C in commands that use a running daemon:
// what they had begun is undone.
func TestInterruptedCommands(t *testing.T) {
	w := running(t)
	stay := w.fork(t, "py-base", 1)[0]
	for _, args := range [][]string{
		{"snapshot", "--tag", "half", "--exec", "sleep 1000"},
		{"fork", "--tag", "py-base", "-n", "100"},
		{"run", "--", "sleep", "1000"},
		{"demo", "-n", "100"},
	} {
		cmd := exec.Command(w.bin, args...)
		cmd.Env = w.env()
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		before := w.quiet(t)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			if len(machines(w.data)) == before {
				return fmt.Errorf("forkd %s has made no machine", args[0])
			}
			return nil
		})
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) // it may be over
		_ = cmd.Wait()                                     // the exit code tells
		if code := cmd.ProcessState.ExitCode(); code != 130 {
			t.Errorf("forkd %s after Ctrl-C: exit code %d", args[0], code)
		}
		eventually(t, func() error {
			if got := strings.Fields(w.must(t, "ls", "-q")); len(got) != 1 || got[0] != stay.ID {
				return fmt.Errorf("forkd %s left %v", args[0], got)
			}
			return nil
		})
	}
	w.checkConsistent(t, stay.ID)
}

// quiet waits until the pool is not being filled and returns how many machines
// there are: the next new one is then somebody's work.
func (w *world) quiet(t *testing.T) int {
	t.Helper()
	const enough = 15 // looks, longer than the making of one machine
	count, same := -1, 0
	eventually(t, func() error {
		now := len(machines(w.data))
		if now != count {
			count, same = now, 0
		}
		if same++; same < enough {
			return fmt.Errorf("%d machines, and still changing", now)
		}
		return nil
	})
	return count
}

// begin starts cmd and reads its standard error up to a line with text.
func begin(t *testing.T, cmd *exec.Cmd, text string) *bufio.Scanner {
	t.Helper()
	pipe, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(pipe)
	var seen []string
	for lines.Scan() {
		seen = append(seen, lines.Text())
		if strings.Contains(lines.Text(), text) {
			return lines
		}
	}
	t.Fatalf("%v never said %q: %v, %q", cmd, text, cmd.Wait(), seen)
	return nil
}

func drain(lines *bufio.Scanner) string {
	var rest strings.Builder
	for lines.Scan() {
		rest.WriteString(lines.Text() + "\n")
	}
	return rest.String()
}

// checkInterrupted sends SIGINT to the process group of cmd and waits for its end.
func checkInterrupted(t *testing.T, cmd *exec.Cmd, stderr *bufio.Scanner) {
	t.Helper()
	if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	rest := drain(stderr)
	_ = cmd.Wait() // the exit code tells
	if code := cmd.ProcessState.ExitCode(); code != 130 || !strings.Contains(rest, "interrupted") {
		t.Errorf("after Ctrl-C: exit code %d, %q", code, rest)
	}
}
