package runsc

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// tool is one run of an outside program.
type tool struct {
	name   string
	args   []string
	dir    string
	env    []string               // added to ours
	onLine func(line string) bool // for each line on stderr; true keeps it out of errors
}

// maxTail bounds what of a program's output goes into an error.
const maxTail = 2 << 10

// run runs it and returns its output. A canceled call ends it with all its children.
func (t tool) run(ctx context.Context) (string, error) {
	path, err := exec.LookPath(t.name)
	if err != nil {
		return "", errdefs.As(errdefs.ErrUnavailable, err)
	}
	cmd := exec.CommandContext(ctx, path, t.args...)
	cmd.Dir, cmd.Env = t.dir, append(os.Environ(), t.env...)
	// A group of its own, or a Ctrl-C would end it before we know.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	var out bytes.Buffer
	lines := &lineWriter{onLine: t.onLine}
	cmd.Stdout, cmd.Stderr = &out, lines
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		return "", fmt.Errorf("run %s %s: %w: %s", t.name, t.args[0], errdefs.As(errdefs.ErrUnavailable, err), lines.rest())
	}
	return out.String(), nil
}

// lineWriter passes lines on and keeps the last of those nobody wanted.
type lineWriter struct {
	onLine func(line string) bool
	buf    []byte
	tail   []string
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.buf = append(w.buf, p...)
	for {
		line, rest, found := bytes.Cut(w.buf, []byte("\n"))
		if !found {
			return len(p), nil
		}
		w.line(string(line))
		w.buf = append([]byte(nil), rest...)
	}
}

func (w *lineWriter) line(s string) {
	if w.onLine != nil && w.onLine(s) {
		return
	}
	const kept = 10
	w.tail = append(w.tail, s)
	if len(w.tail) > kept {
		w.tail = w.tail[1:]
	}
}

// rest is the end of the output for an error text, in one line.
func (w *lineWriter) rest() string {
	text := strings.Join(append(w.tail, string(w.buf)), "; ")
	return strings.TrimSpace(text[max(0, len(text)-maxTail):])
}
