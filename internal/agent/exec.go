package agent

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// exec runs one program to its end.
func (a *Agent) exec(ctx context.Context, m agentwire.ExecRequest) (answer, error) {
	timeout, limit, err := checkBounds(m.Timeout, m.OutputLimit)
	if err != nil {
		return answer{}, err
	}
	spec, err := a.execSpec(m)
	if err != nil {
		return answer{}, err
	}
	for { // again if a capture began in between
		if err := a.gate.pass(ctx); err != nil {
			return answer{}, err
		}
		if spec.group, err = a.groups.newExec(); err != errClosed {
			break
		}
	}
	if err != nil {
		return answer{}, err
	}
	defer a.groups.release(spec.group)
	out, errs := &sink{budget: &a.budget, limit: limit}, &sink{budget: &a.budget, limit: limit}
	run, err := a.startPiped(spec, m.Stdin, out, errs)
	if err != nil {
		return answer{}, err
	}
	res := agentwire.ExecResult{}
	begin := time.Now()
	canceled := false
	switch a.gate.await(ctx, run.proc.done, timeout) {
	case waitTimeout:
		res.TimedOut = true
		run.kill()
	case waitCanceled:
		canceled = true
		run.kill()
	}
	run.finish()
	res.Duration = time.Since(begin)
	describeExit(&res, run.proc)
	res.OOMKilled = !res.TimedOut && !canceled && res.Signal == int(syscall.SIGKILL) && a.oom.happened()
	stdout, stderr := out.take(), errs.take()
	res.StdoutTruncated, res.StderrTruncated = stdout.truncated, stderr.truncated
	release := func() { a.budget.give(stdout.reserved + stderr.reserved) }
	if canceled {
		release()
		return answer{}, errdefs.New(errdefs.ErrCanceled, "exec %s: canceled", m.Argv[0])
	}
	return answer{body: res.Parts(stdout.pieces, stderr.pieces), after: release}, nil
}

// checkBounds applies the defaults of exec and eval and refuses what exceeds them.
func checkBounds(timeout time.Duration, limit int) (time.Duration, int, error) {
	switch {
	case timeout < 0 || timeout > agentwire.MaxExecTimeout:
		return 0, 0, errdefs.New(errdefs.ErrInvalid, "timeout %s is not within 0 and %s", timeout, agentwire.MaxExecTimeout)
	case limit < 0 || limit > agentwire.MaxOutputLimit:
		return 0, 0, errdefs.New(errdefs.ErrInvalid, "output limit %d is not within 0 and %d bytes", limit, agentwire.MaxOutputLimit)
	}
	if timeout == 0 {
		timeout = agentwire.DefaultExecTimeout
	}
	if limit == 0 {
		limit = agentwire.DefaultOutputLimit
	}
	return timeout, limit, nil
}

// execSpec resolves who, where and what.
func (a *Agent) execSpec(m agentwire.ExecRequest) (startSpec, error) {
	if len(m.Argv) == 0 || m.Argv[0] == "" {
		return startSpec{}, errdefs.New(errdefs.ErrInvalid, "exec without a program")
	}
	for _, arg := range m.Argv {
		if strings.IndexByte(arg, 0) >= 0 {
			return startSpec{}, errdefs.New(errdefs.ErrInvalid, "exec: an argument holds a NUL byte")
		}
	}
	who, err := lookupUser(m.User)
	if err != nil {
		return startSpec{}, err
	}
	env := a.identity.environ(who)
	for k, v := range m.Env {
		if err := checkEnv(k, v); err != nil {
			return startSpec{}, err
		}
		env[k] = v
	}
	dir := m.Cwd
	if dir == "" {
		dir = who.home
		if info, err := os.Stat(dir); err != nil || !info.IsDir() {
			dir = "/"
		}
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() || !filepath.IsAbs(dir) {
		return startSpec{}, errdefs.New(errdefs.ErrInvalid, "working directory %.200q is not an absolute path of a directory", dir)
	}
	path, err := lookPath(m.Argv[0], dir, env["PATH"])
	if err != nil {
		return startSpec{}, err
	}
	return startSpec{path: path, argv: m.Argv, env: flatten(env), dir: dir, cred: who.cred}, nil
}

func checkEnv(k, v string) error {
	if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
		return errdefs.New(errdefs.ErrInvalid, "environment variable %.80q has no valid name or value", k)
	}
	return nil
}

func flatten(env map[string]string) []string {
	list := make([]string, 0, len(env))
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	return list
}

// lookPath finds a program as execvp does, relative to dir.
func lookPath(name, dir, path string) (string, error) {
	runnable := func(p string) bool {
		info, err := os.Stat(p)
		return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
	}
	if strings.Contains(name, "/") {
		full := name
		if !filepath.IsAbs(full) {
			full = filepath.Join(dir, full)
		}
		info, err := os.Stat(full)
		switch {
		case err != nil:
			return "", missing(name)
		case info.IsDir() || !runnable(full):
			return "", errdefs.New(errdefs.ErrPermission, "program %.200q is not an executable file", name)
		}
		return full, nil
	}
	for d := range strings.SplitSeq(path, ":") {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		if p := filepath.Join(d, name); runnable(p) {
			return p, nil
		}
	}
	return "", missing(name)
}

func missing(name string) error {
	return errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "program %.200q does not exist in the sandbox", name),
		"install it in the image, or give its full path")
}

// piped is a running program with its standard streams in our hands.
type piped struct {
	proc  *process
	group *group
	pumps []*pump
	stdin *os.File
	fed   chan struct{}
}

// startPiped starts spec with stdin and collects its output in out and errs.
func (a *Agent) startPiped(spec startSpec, stdin []byte, out, errs *sink) (*piped, error) {
	run := &piped{group: spec.group, fed: make(chan struct{})}
	var theirs []*os.File
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	spec.files = []*os.File{nil, nil, nil}
	if len(stdin) > 0 {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, errdefs.New(errdefs.ErrResourceExhausted, "exec: %w", err)
		}
		run.stdin = w
		theirs = append(theirs, r)
		spec.files[0] = r
	}
	for i, s := range []*sink{out, errs} {
		r, w, err := os.Pipe()
		if err == nil {
			theirs = append(theirs, w)
			spec.files[i+1] = w
			var p *pump
			if p, err = newPump(r, s); err == nil {
				run.pumps = append(run.pumps, p)
			}
		}
		if err != nil {
			run.discard()
			return nil, errdefs.New(errdefs.ErrResourceExhausted, "exec: %w", err)
		}
	}
	var err error
	if run.proc, err = a.procs.start(spec); err != nil {
		run.discard()
		return nil, err
	}
	go func() {
		defer close(run.fed)
		if run.stdin != nil {
			run.stdin.Write(stdin) // a program need not read all of it
			run.stdin.Close()
		}
	}()
	return run, nil
}

func (r *piped) discard() {
	for _, p := range r.pumps {
		p.close()
	}
	if r.stdin != nil {
		r.stdin.Close()
	}
}

// kill ends the program and all it started.
func (r *piped) kill() {
	if r.group == nil { // no cgroup holds what it started
		for _, pid := range descendants(r.proc.pid) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	r.group.kill()
	r.proc.kill(syscall.SIGKILL)
}

// finish waits for the program's end and takes what it has written by then. A
// process that it left behind keeps no answer waiting: its output is cut here.
func (r *piped) finish() {
	<-r.proc.done
	if r.stdin != nil {
		r.stdin.SetWriteDeadline(time.Unix(1, 0))
	}
	<-r.fed
	for _, p := range r.pumps {
		p.flush()
		p.close()
	}
}

func describeExit(res *agentwire.ExecResult, p *process) {
	if p.status.Signaled() {
		res.Signal = int(p.status.Signal())
		res.ExitCode = 128 + res.Signal
	} else {
		res.ExitCode = p.status.ExitStatus()
	}
	res.CPU = time.Duration(p.usage.Utime.Nano() + p.usage.Stime.Nano())
	res.MaxRSSKiB = p.usage.Maxrss
}
