package guest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
)

// agentBinary is the real agent, built once for all tests of the package.
var agentBinary string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "forkd-guest-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		agentBinary = filepath.Join(dir, "forkd-agent")
		build := exec.Command("go", "build", "-o", agentBinary, "forkd.dev/forkd/cmd/forkd-agent")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build agent: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

// rig is a real agent in stream mode and the host's end of its channel.
type rig struct {
	t    *testing.T
	root string
	host *os.File
	cmd  *exec.Cmd
	last *Client
}

// startAgent starts an agent whose identity files are in a directory of the test.
func startAgent(t *testing.T, args ...string) *rig {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "guest end")
	r := &rig{t: t, root: t.TempDir(), host: os.NewFile(uintptr(fds[0]), "host end")}
	r.cmd = exec.Command(agentBinary, append([]string{"-fd", "3", "-no-system", "-root", r.root}, args...)...)
	r.cmd.ExtraFiles = []*os.File{theirs}
	r.cmd.Stderr = os.Stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	t.Cleanup(func() {
		r.host.Close()
		ended := make(chan error, 1)
		go func() { ended <- r.cmd.Wait() }()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("agent: %v", err)
			}
		case <-time.After(20 * time.Second):
			r.cmd.Process.Kill()
			t.Errorf("agent did not end with its channel")
		}
	})
	return r
}

// dial gives a connection over the channel. Closing one does not end the channel.
func (r *rig) dial() net.Conn {
	r.t.Helper()
	conn, err := net.FileConn(r.host)
	if err != nil {
		r.t.Fatal(err)
	}
	return conn
}

// connect connects in place of the last connection: two readers on one channel
// would take each other's bytes.
func (r *rig) connect() *Client {
	r.t.Helper()
	if r.last != nil {
		r.last.Close()
	}
	c, err := Connect(testContext(r.t), r.dial(), Options{})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	r.last = c
	return c
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func newClient(t *testing.T, args ...string) *Client {
	t.Helper()
	return startAgent(t, args...).connect()
}

func mustExec(t *testing.T, c *Client, argv ...string) agentwire.ExecResult {
	t.Helper()
	res, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: argv})
	if err != nil {
		t.Fatalf("exec %v: %v", argv, err)
	}
	return res
}

func mustEval(t *testing.T, c *Client, code string) agentwire.EvalResult {
	t.Helper()
	res, err := c.Eval(testContext(t), agentwire.EvalRequest{Code: code})
	if err != nil {
		t.Fatalf("eval %q: %v", code, err)
	}
	return res
}

// evalTo fails the test unless code evaluates to want.
func evalTo(t *testing.T, c *Client, code, want string) {
	t.Helper()
	if res := mustEval(t, c, code); res.Error != "" || res.Result != want {
		t.Fatalf("eval %q = %q, error %q\n%s", code, res.Result, res.Error, res.Traceback)
	}
}

func wantClass(t *testing.T, err, class error) {
	t.Helper()
	if !errors.Is(err, class) {
		t.Fatalf("error %v, want class %v", err, class)
	}
}
