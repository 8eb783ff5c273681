package agent

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agentwire"
)

// Channel is the byte stream to the daemon. A virtio port has no end: while no
// host is connected its reads return nothing and its writes wait, and neither
// means that anything is over. Other streams end at EOF.
type Channel struct {
	in, out       *os.File
	rawIn, rawOut syscall.RawConn
	endless       bool
	torn          bool // a frame was written in part
}

// Ends says what reading nothing means on a channel.
type Ends int

// The kinds of channels.
const (
	Ending  Ends = iota // it is over
	Endless             // nobody is connected now
)

// NewChannel takes over two descriptors, which may be the same file.
func NewChannel(in, out *os.File, ends Ends) (*Channel, error) {
	c := &Channel{in: in, out: out, endless: ends == Endless}
	var err error
	if c.rawIn, err = in.SyscallConn(); err != nil {
		return nil, fmt.Errorf("use channel: %w", err)
	}
	if c.rawOut, err = out.SyscallConn(); err != nil {
		return nil, fmt.Errorf("use channel: %w", err)
	}
	// Deadlines work only on descriptors that can be polled; nothing else will do.
	if err := out.SetWriteDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("poll channel: %w", err)
	}
	return c, nil
}

// Inherit takes over a descriptor that this process was started with, for a channel.
func Inherit(fd int) (*os.File, error) {
	// A copy: the runtime's poller may know the standard descriptors already.
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("use descriptor %d: %w", fd, err)
	}
	if fd > unix.Stderr {
		_ = unix.Close(fd)
	}
	if err := unix.SetNonblock(own, true); err != nil {
		return nil, fmt.Errorf("use descriptor %d: %w", fd, err)
	}
	return os.NewFile(uintptr(own), "channel"), nil
}

// Read waits for bytes. The runtime's poller is edge-triggered: a port without a
// host, which polls as hung up all the time, wakes nobody until something changes.
func (c *Channel) Read(p []byte) (n int, err error) {
	rerr := c.rawIn.Read(func(fd uintptr) bool {
		for {
			n, err = unix.Read(int(fd), p)
			switch {
			case err == unix.EINTR:
				continue
			case err == unix.EAGAIN, n == 0 && err == nil && c.endless:
				return false
			}
			return true
		}
	})
	if rerr != nil {
		return 0, rerr
	}
	if err == unix.ECONNRESET { // a socket whose peer left with something unread
		return 0, io.EOF
	}
	if err != nil {
		return 0, fmt.Errorf("read channel: %w", err)
	}
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// write writes one encoded frame. After an interrupted write the next one starts
// with a mark, which aborts the rest of that frame.
func (c *Channel) write(p []byte) error {
	if c.torn {
		if err := c.writeAll([]byte{agentwire.Mark}); err != nil {
			return err
		}
		c.torn = false
	}
	return c.writeAll(p)
}

func (c *Channel) writeAll(p []byte) (err error) {
	rerr := c.rawOut.Write(func(fd uintptr) bool {
		for len(p) > 0 {
			var n int
			n, err = unix.Write(int(fd), p)
			switch {
			case err == unix.EINTR:
				err = nil
				continue
			case err == unix.EAGAIN:
				err = nil
				return false
			case err != nil:
				return true
			}
			c.torn = true
			p = p[n:]
		}
		c.torn = false
		return true
	})
	if err = errors.Join(rerr, err); err != nil {
		return fmt.Errorf("write channel: %w", err)
	}
	return nil
}

// interrupt makes a running and all later writes fail until rearm.
func (c *Channel) interrupt() { c.out.SetWriteDeadline(time.Unix(1, 0)) }

func (c *Channel) rearm() { c.out.SetWriteDeadline(time.Time{}) }

// Close closes the descriptors.
func (c *Channel) Close() error {
	if c.in == c.out {
		return c.in.Close()
	}
	return errors.Join(c.in.Close(), c.out.Close())
}
