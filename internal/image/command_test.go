package image

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

func TestRunReports(t *testing.T) {
	t.Parallel()
	var lines []string
	out, err := run(t.Context(), command{
		name: "sh", args: []string{"-c", `echo one; echo two >&2; echo $EXTRA; pwd`}, env: []string{"EXTRA=three"}, dir: "/",
		onLine: func(line string) { lines = append(lines, line) },
	})
	if err != nil || string(out) != "one\nthree\n/\n" || len(lines) != 4 {
		t.Errorf("%q, %v, lines %q", out, err, lines)
	}
	_, err = run(t.Context(), command{name: "sh", args: []string{"-c", "echo reason >&2; exit 3"}})
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 || tailOf(err) != "reason\n" || !strings.Contains(err.Error(), "reason") {
		t.Errorf("failing program: %v", err)
	}
	_, err = run(t.Context(), command{name: "no-such-program"})
	if !errors.Is(err, errdefs.ErrUnavailable) || errdefs.Hint(err) != "apt-get install no-such-program" {
		t.Errorf("missing program: %v, hint %q", err, errdefs.Hint(err))
	}
	out, err = run(t.Context(), command{name: "head", args: []string{"-c", strconv.Itoa(3 * maxStdout), "/dev/zero"}})
	if err != nil || len(out) != maxStdout {
		t.Errorf("large output: %d bytes kept, %v", len(out), err)
	}
}

func TestCanceledProgramDiesWithItsChildren(t *testing.T) {
	t.Parallel()
	for _, isolate := range []isolation{shareAll, privateMounts} {
		if isolate == privateMounts && os.Geteuid() != 0 {
			t.Log("private namespaces: needs root")
			continue
		}
		ctx, cancel := context.WithCancel(t.Context())
		// A child that holds the output open and left its process group would stay
		// without a namespace; one in the group must go in both cases.
		_, err := run(ctx, command{
			name: "sh", args: []string{"-c", "sleep 1000 & echo ready; wait"}, isolate: isolate,
			onLine: func(string) { cancel() },
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("isolation %d: %v, want Canceled", isolate, err)
		}
		cancel()
	}
}

const childDirEnv = "FORKD_IMAGE_TEST_DIR"

// TestHelperProcess is no test: it builds until it is killed by
// TestKilledDaemonLeavesNothing.
func TestHelperProcess(t *testing.T) {
	dir := os.Getenv(childDirEnv)
	if dir == "" {
		return
	}
	_, err := run(t.Context(), command{
		name: "sh", isolate: privateMounts, env: []string{"DIR=" + dir},
		args: []string{"-c", `mount -t tmpfs none "$DIR"; (setsid sleep 1000 &) ; echo ready; setsid sleep 1001`},
		onLine: func(line string) {
			if line == "ready" {
				os.Stdout.WriteString("ready\n")
			}
		},
	})
	t.Log(err)
}

// TestKilledDaemonLeavesNothing kills a process in the middle of an isolated
// program: the mounts and processes of the program end with it.
func TestKilledDaemonLeavesNothing(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root for private namespaces")
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelperProcess$")
	cmd.Env = append(os.Environ(), childDirEnv+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill() // should the test fail before it does so itself
	ready := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(out, ready); err != nil || string(ready) != "ready\n" {
		t.Fatalf("helper says %q, %v", ready, err)
	}
	inside := descendants(t, cmd.Process.Pid)
	if len(inside) < 3 {
		t.Fatalf("found %d processes of the program, want its init, shell and sleep", len(inside))
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for _, p := range inside {
		if err := p.Wait(t.Context()); err != nil {
			t.Errorf("process %d of the program is left: %v", p.PID, err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), dir) {
		t.Errorf("a mount at %s is left, %v", dir, err)
	}
}

// descendants lists the processes in the namespace of the child of pid.
func descendants(t *testing.T, pid int) []linux.Process {
	t.Helper()
	children, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	ours, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	namespace := ""
	byNamespace := map[string][]linux.Process{}
	for _, stat := range children {
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(stat)))
		if err != nil {
			t.Fatal(err)
		}
		b, err1 := os.ReadFile(stat)
		ns, err2 := os.Readlink(filepath.Join(filepath.Dir(stat), "ns/pid"))
		p, err3 := linux.Identify(child)
		if errors.Join(err1, err2, err3) != nil || ns == ours {
			continue // it has ended meanwhile, or is not isolated
		}
		byNamespace[ns] = append(byNamespace[ns], p)
		_, after, _ := strings.Cut(string(b), ") ")
		if fields := strings.Fields(after); len(fields) > 1 && fields[1] == strconv.Itoa(pid) {
			namespace = ns
		}
	}
	return byNamespace[namespace]
}
