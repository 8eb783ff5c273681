package agent

import (
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/agentwire/link"
	"forkd.dev/forkd/internal/errdefs"
)

// serveStart starts a program that runs on by itself, in every fork too.
func (a *Agent) serveStart(st *link.Stream) {
	st.Accept()
	defer st.Close()
	proc, err := a.startDetached(st)
	if err != nil {
		agentwire.WriteAnswer(st, "", err)
		st.CloseWrite()
		drain(st)
		return
	}
	if agentwire.WriteAnswer(st, strconv.Itoa(proc.pid), nil) != nil {
		return // the host is gone; the program goes on
	}
	select {
	case <-proc.done:
		var res agentwire.ExecResult
		describeExit(&res, proc)
		agentwire.WriteAnswer(st, strconv.Itoa(res.ExitCode), nil)
		st.CloseWrite()
		drain(st)
	case <-st.Done():
	case <-a.ctx.Done():
	}
}

// startDetached reads an ExecRequest to its end and starts its program.
func (a *Agent) startDetached(r io.Reader) (*process, error) {
	body, err := io.ReadAll(io.LimitReader(r, agentwire.MaxRequest))
	if err != nil {
		return nil, errdefs.As(errdefs.ErrUnavailable, err)
	}
	var m agentwire.ExecRequest
	if err := m.Decode(body); err != nil {
		return nil, errdefs.As(errdefs.ErrInvalid, err)
	}
	spec, err := a.execSpec(m)
	if err != nil {
		return nil, err
	}
	path := a.path(agentwire.StartLog)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, errdefs.New(errdefs.ErrInternal, "start %s: %w", m.Argv[0], err)
	}
	log, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return nil, errdefs.New(errdefs.ErrInternal, "start %s: %w", m.Argv[0], err)
	}
	defer log.Close()
	spec.files = []*os.File{nil, log, log}
	if err := a.gate.pass(a.ctx); err != nil {
		return nil, err
	}
	if spec.group, err = a.groups.newExec(); err != nil {
		return nil, err
	}
	defer a.groups.release(spec.group)
	return a.procs.start(spec)
}

// serveStartLog sends a part of the log of the started program.
func (a *Agent) serveStartLog(st *link.Stream, offset int64) {
	st.Accept()
	defer st.Close()
	fd, err := unix.Open(a.path(agentwire.StartLog), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err == nil {
		f := os.NewFile(uintptr(fd), agentwire.StartLog)
		defer f.Close()
		io.Copy(st, io.NewSectionReader(f, offset, agentwire.StartLogChunk))
	}
	st.CloseWrite()
	drain(st)
}
