package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

const (
	maxStdout = 1 << 20
	maxTail   = 8 << 10
	// drainTime is how long the output of a killed program is still read.
	drainTime = 5 * time.Second
	toolPath  = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// command is one run of an outside program.
type command struct {
	name    string
	args    []string
	dir     string
	env     []string          // added to a minimal environment
	onLine  func(line string) // for each line of output, one call at a time; may be nil
	isolate isolation
}

// isolation says what a program shares with this process.
type isolation int

const (
	shareAll isolation = iota
	// privateMounts gives private mount and process namespaces: all mounts and all
	// processes, daemons included, end with the program. It needs root.
	privateMounts
	// mappedUsers gives an ordinary user the same, as root of a user namespace.
	mappedUsers
)

// commandError is a program that failed. Tail is the end of its output.
type commandError struct {
	name string
	err  error
	tail string
}

func (e *commandError) Error() string {
	text := fmt.Sprintf("run %s: %v", e.name, e.err)
	if tail := lastLines(e.tail, 12); tail != "" {
		text += ":\n" + tail
	}
	return text
}

func (e *commandError) Unwrap() error { return e.err }

// tailOf returns the end of the output of the program that failed with err.
func tailOf(err error) string {
	var e *commandError
	if errors.As(err, &e) {
		return e.tail
	}
	return ""
}

// run runs a program to its end and returns its standard output, at most
// maxStdout bytes. It and all it started are killed when ctx ends.
func run(ctx context.Context, c command) ([]byte, error) {
	path, err := findTool(c.name)
	if err != nil {
		return nil, err
	}
	cmd := build(ctx, c, path)
	tail := &lineSink{onLine: c.onLine}
	stdout := &limitedBuffer{also: tail}
	cmd.Stdout, cmd.Stderr = stdout, tail

	// The death signal comes when the starting thread ends, so it must not.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("run %s: %w", c.name, ctx.Err())
	case err != nil:
		return nil, &commandError{name: c.name, err: err, tail: tail.text()}
	}
	return stdout.buf.Bytes(), nil
}

func build(ctx context.Context, c command, path string) *exec.Cmd {
	argv := append([]string{path}, c.args...)
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	switch c.isolate {
	case privateMounts:
		// The shell stays process 1 of the namespace and reaps; with a /proc of its
		// own the program sees only itself. Unshare, unlike clone, makes mounts private.
		argv = append(buildShell(), argv...)
		attr.Cloneflags = syscall.CLONE_NEWPID
		attr.Unshareflags = syscall.CLONE_NEWNS
	case mappedUsers:
		argv = append(append(append([]string{"unshare"}, unshareArgs()...), buildShell()...), argv...)
		attr.Setpgid = true
	case shareAll:
		attr.Setpgid = true
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if c.isolate == mappedUsers {
		cmd.Path, cmd.Err = "/usr/bin/unshare", nil // of util-linux, which is everywhere
	}
	cmd.Dir = c.dir
	cmd.Env = append(toolEnv(), c.env...)
	cmd.SysProcAttr = attr
	cmd.WaitDelay = drainTime
	if attr.Setpgid {
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	}
	return cmd
}

// buildShell is process 1 of a namespace: it gives it a /proc of its own and reaps.
func buildShell() []string {
	return []string{"/bin/sh", "-c", `umask 022; mount -t proc proc /proc || exit 125; "$@"; exit $?`, "forkd-build"}
}

// toolEnv is what outside programs see: nothing of ours but the proxies.
func toolEnv() []string {
	env := []string{"PATH=" + toolPath, "LC_ALL=C.UTF-8", "HOME=/root", "DEBIAN_FRONTEND=noninteractive", "TERM=dumb"}
	for _, kv := range os.Environ() {
		key, _, _ := strings.Cut(kv, "=")
		switch strings.ToLower(key) {
		case "http_proxy", "https_proxy", "no_proxy":
			env = append(env, kv)
		}
	}
	return env
}

// toolPackage tells which Debian package holds a program.
func toolPackage(name string) string {
	switch name {
	case "mke2fs", "e2fsck", "debugfs":
		return "e2fsprogs"
	case "mkfs.erofs":
		return "erofs-utils"
	case "dpkg-deb":
		return "dpkg"
	case "apt-get", "apt-cache":
		return "apt"
	}
	return name
}

// findTool looks in the directories of system programs, whatever our PATH is.
func findTool(name string) (string, error) {
	for dir := range strings.SplitSeq(toolPath, ":") {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", errdefs.WithHint(
		errdefs.New(errdefs.ErrUnavailable, "run %s: the program is not installed: %w", name, fs.ErrNotExist),
		"apt-get install %s", toolPackage(name))
}

// lineSink keeps the end of an output and passes its lines on, one at a time. It
// takes writes from the two goroutines of a program's outputs.
type lineSink struct {
	onLine func(string)

	mu   sync.Mutex
	tail []byte // +checklocks:mu
	line []byte // +checklocks:mu
}

func (s *lineSink) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tail = append(s.tail, p...)
	if over := len(s.tail) - maxTail; over > 0 {
		s.tail = append(s.tail[:0], s.tail[over:]...)
	}
	if s.onLine == nil {
		return len(p), nil
	}
	s.line = append(s.line, p...)
	for {
		line, rest, found := bytes.Cut(s.line, []byte("\n"))
		if !found {
			break
		}
		s.onLine(string(line))
		s.line = append(s.line[:0], rest...)
	}
	if len(s.line) > maxTail {
		s.line = s.line[:0]
	}
	return len(p), nil
}

func (s *lineSink) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.ToValidUTF8(string(s.tail), "?")
}

// limitedBuffer keeps the start of an output and drops what exceeds maxStdout.
type limitedBuffer struct {
	buf  bytes.Buffer
	also *lineSink
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	b.buf.Write(p[:min(len(p), maxStdout-b.buf.Len())])
	return b.also.Write(p)
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
