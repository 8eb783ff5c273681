package cli

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/frontend/rest"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
	forkd "forkd.dev/forkd/sdk/go"
)

// rig runs command lines against the real front end over a fake, by a unix socket.
type rig struct {
	t      *testing.T
	svc    *resttest.Service
	socket string
	env    map[string]string
	tty    bool
	stdin  string
	alone  bool // no daemon of this host is found
	change func(*Env)
}

func newRig(t *testing.T) *rig {
	t.Helper()
	svc := resttest.New()
	h, err := rest.New(rest.Config{Service: svc, Version: "daemon-test"})
	if err != nil {
		t.Fatal(err)
	}
	socket := resttest.ServeUnix(t, h)
	return &rig{t: t, svc: svc, socket: socket, env: map[string]string{"FORKD_URL": "unix://" + socket}}
}

// noDaemon takes the daemon's address away.
func (r *rig) noDaemon() {
	r.env = map[string]string{"FORKD_URL": "unix://" + filepath.Join(r.t.TempDir(), "none.sock")}
}

// outcome is what a command line left.
type outcome struct {
	code           int
	stdout, stderr string
}

// lockedBuffer is written by progress timers, too.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (r *rig) run(args ...string) outcome {
	r.t.Helper()
	return r.runContext(r.t.Context(), args...)
}

func (r *rig) runContext(ctx context.Context, args ...string) outcome {
	r.t.Helper()
	var stdout, stderr lockedBuffer
	env := Env{
		Stdout: &stdout, Stderr: &stderr, Version: "cli-test",
		Getenv:     func(k string) string { return r.env[k] },
		Now:        func() time.Time { return resttest.Born().Add(90 * time.Minute) },
		IsTerminal: func(stream any) bool { return r.tty && stream == io.Writer(&stdout) },
	}
	if r.stdin != "" {
		env.Stdin = strings.NewReader(r.stdin)
	}
	if r.alone {
		env.FindDaemon = func() (*forkd.Client, error) {
			return forkd.New(forkd.Options{Socket: filepath.Join(r.t.TempDir(), "none.sock"), Getenv: env.Getenv})
		}
	}
	if r.change != nil {
		r.change(&env)
	}
	code := Run(ctx, args, env)
	return outcome{code, stdout.String(), stderr.String()}
}

var update = flag.Bool("update", false, "write the golden files")

// golden compares text with testdata/name.golden.
func golden(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != text {
		t.Errorf("%s differs (run with -update to accept):\n--- got ---\n%s--- want ---\n%s", path, text, want)
	}
}

// transcript is an outcome as a golden file holds it.
func transcript(args []string, o outcome) string {
	var b strings.Builder
	fmt.Fprintf(&b, "$ forkd %s\n%s", strings.Join(args, " "), o.stdout)
	for line := range strings.Lines(o.stderr) {
		fmt.Fprintf(&b, "! %s", line)
	}
	fmt.Fprintf(&b, "exit %d\n", o.code)
	return b.String()
}
