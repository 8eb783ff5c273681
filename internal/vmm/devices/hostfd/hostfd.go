// Package hostfd is the host's end of a device that moves bytes or frames: a
// non-blocking descriptor and two goroutines that wait until it can be read or written.
//
// The waiting is done by Go's poller, the reading and writing by the device, under the lock
// of its Transport: [FD.Write] never waits, and Config.Readable is called with the descriptor number when
// there may be something to read.
package hostfd

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Verdict is what a device makes of a descriptor that may have something to read.
type Verdict int

// What Readable found.
const (
	Parked Verdict = iota // it does not want to read now; WantInput calls it again
	Empty                 // there was nothing (EAGAIN): call again when there is
	Ended                 // the other side is gone
)

// Config is what a device does with its descriptor. All of it is required.
type Config struct {
	// Readable reads as much as the device wants. It is called by one goroutine.
	Readable func(fd int) Verdict
	// Writable is called when the descriptor takes bytes again after WantOutput.
	Writable func()
	// Ended is called when Readable said so or Fail was called; it calls Close. It may be called after Close.
	Ended func()
	// Goroutines counts the goroutines, so that the device can wait for them.
	Goroutines *sync.WaitGroup
}

// FD is a descriptor in use.
type FD struct {
	f   *os.File
	raw syscall.RawConn
	cfg Config

	input, output chan struct{} // wishes
	ended         chan struct{} // closed by Close
	once          sync.Once
	failed        atomic.Bool

	// For Write, whose callers hold a lock of their own.
	out     []byte
	outN    int
	outErr  error
	writeFD func(uintptr)
}

// New takes f, which belongs to the FD unless there is an error.
func New(f *os.File, cfg Config) (*FD, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("use descriptor of device: %w", err)
	}
	c := &FD{f: f, raw: raw, cfg: cfg,
		input: make(chan struct{}, 1), output: make(chan struct{}, 1), ended: make(chan struct{})}
	// Made once, so that moving bytes allocates nothing.
	c.writeFD = func(fd uintptr) { c.outN, c.outErr = unix.Write(int(fd), c.out) }
	return c, nil
}

// Start begins the goroutines. They end soon after Close.
func (c *FD) Start() {
	c.cfg.Goroutines.Add(2)
	c.WantInput()
	go c.receive()
	go c.awaitWritable()
}

// Close ends it. It may be repeated. It may wait for Readable and Writable, so the caller holds no lock
// that these take.
func (c *FD) Close() {
	c.once.Do(func() {
		close(c.ended)
		c.f.Close()
	})
}

// Fail has Ended called soon, for callers that cannot Close.
func (c *FD) Fail() {
	c.failed.Store(true)
	c.WantInput()
}

// WantInput has Readable called when there is something to read.
func (c *FD) WantInput() { wish(c.input) }

// WantOutput has Writable called when the descriptor takes bytes.
func (c *FD) WantOutput() { wish(c.output) }

func wish(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (c *FD) receive() {
	defer c.cfg.Goroutines.Done()
	verdict := Parked
	ready := func(fd uintptr) bool {
		verdict = c.cfg.Readable(int(fd))
		if c.failed.Load() {
			verdict = Ended
		}
		return verdict != Empty
	}
	for verdict != Ended {
		select {
		case <-c.input:
		case <-c.ended:
			return
		}
		if err := c.raw.Read(ready); err != nil {
			break // closed
		}
	}
	c.cfg.Ended()
}

func (c *FD) awaitWritable() {
	defer c.cfg.Goroutines.Done()
	var fds [1]unix.PollFd
	writable := func(fd uintptr) bool {
		// Asked anew: readiness that came before this call is not told again.
		fds[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT}
		n, err := unix.Poll(fds[:], 0)
		return n != 0 || (err != nil && !errors.Is(err, unix.EINTR))
	}
	for {
		select {
		case <-c.output:
		case <-c.ended:
			return
		}
		if err := c.raw.Write(writable); err != nil {
			return
		}
		c.cfg.Writable()
	}
}

// Write hands bytes to the descriptor as far as it takes them at once; EAGAIN says that
// it takes none. One caller at a time.
func (c *FD) Write(b []byte) (int, error) {
	for {
		c.out, c.outN, c.outErr = b, 0, nil
		// Control and not Write, which would wait for awaitWritable.
		if err := c.raw.Control(c.writeFD); err != nil {
			return 0, fmt.Errorf("write to descriptor of device: %w", err)
		}
		c.out = nil
		if !errors.Is(c.outErr, unix.EINTR) {
			return max(c.outN, 0), c.outErr
		}
	}
}

// Read is read(2) that goes on after signals.
func Read(fd int, b []byte) (int, error) {
	n, err := unix.Read(fd, b)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Read(fd, b)
	}
	return n, err
}
