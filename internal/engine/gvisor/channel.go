package gvisor

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// The named pipes of a machine, in its directory. The sandbox opens each for reading
// and writing, so none of them ends before it does, whoever comes and goes here.
const (
	inPipe      = "in"      // to the agent
	outPipe     = "out"     // from the agent
	consolePipe = "console" // what init prints
)

// makePipes makes the pipes of a machine and opens them for its sandbox: descriptors
// 0, 1 and 2. The caller closes them once the sandbox has them.
func makePipes(dir string) (stdio []*os.File, err error) {
	defer func() {
		if err != nil {
			closeAll(stdio)
			stdio = nil
		}
	}()
	for _, name := range []string{inPipe, outPipe, consolePipe} {
		path := filepath.Join(dir, name)
		if err := unix.Mkfifo(path, 0o600); err != nil {
			return stdio, fmt.Errorf("make pipe %s: %w", name, err)
		}
		f, err := openPipe(path, unix.O_RDWR)
		if err != nil {
			return stdio, err
		}
		stdio = append(stdio, f)
	}
	return stdio, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// openPipe opens a pipe without waiting for its other end.
func openPipe(path string, mode int) (*os.File, error) {
	fd, err := unix.Open(path, mode|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.ErrUnavailable, "open pipe %s: its sandbox has ended: %w", filepath.Base(path), err)
	}
	if err != nil {
		return nil, fmt.Errorf("open pipe %s: %w", filepath.Base(path), err)
	}
	return os.NewFile(uintptr(fd), filepath.Base(path)), nil
}

// pipeConn is a net.Conn over the two pipes of an agent.
type pipeConn struct {
	in, out   *os.File
	closeOnce sync.Once
	closeErr  error
}

var _ net.Conn = (*pipeConn)(nil)

// dialPipes opens the agent's pipes in a machine's directory.
func dialPipes(dir string) (*pipeConn, error) {
	// Opening for writing finds out whether there is a sandbox that reads.
	in, err := openPipe(filepath.Join(dir, inPipe), unix.O_WRONLY)
	if err != nil {
		return nil, err
	}
	out, err := openPipe(filepath.Join(dir, outPipe), unix.O_RDONLY)
	if err != nil {
		_ = in.Close()
		return nil, err
	}
	return &pipeConn{in: in, out: out}, nil
}

func (c *pipeConn) Read(p []byte) (int, error)  { return c.out.Read(p) }
func (c *pipeConn) Write(p []byte) (int, error) { return c.in.Write(p) }

// Close closes our ends. The agent is not told: the next HELLO does that.
func (c *pipeConn) Close() error {
	c.closeOnce.Do(func() { c.closeErr = errors.Join(c.in.Close(), c.out.Close()) })
	return c.closeErr
}

func (c *pipeConn) LocalAddr() net.Addr  { return pipeAddr("daemon") }
func (c *pipeConn) RemoteAddr() net.Addr { return pipeAddr("agent") }

func (c *pipeConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}
func (c *pipeConn) SetReadDeadline(t time.Time) error  { return c.out.SetReadDeadline(t) }
func (c *pipeConn) SetWriteDeadline(t time.Time) error { return c.in.SetWriteDeadline(t) }

type pipeAddr string

func (a pipeAddr) Network() string { return "pipe" }
func (a pipeAddr) String() string  { return string(a) }
