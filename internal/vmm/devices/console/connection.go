package console

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/vmm/devices"
)

// connection is the host's end of a port.
type connection struct {
	d    *Device
	port int
	f    *os.File
	raw  syscall.RawConn

	input, output chan struct{} // wishes to be called when the descriptor is ready
	ended         chan struct{} // closed by close
	failed        atomic.Bool   // a write failed: receive closes it

	// Of the receiving goroutine.
	fill     func() error
	fillFD   int
	received receiveResult

	// Of whoever holds the Transport's lock.
	out     []byte
	outN    int
	outErr  error
	writeFD func(uintptr)
}

type receiveResult int

const (
	receiveParked receiveResult = iota // nothing to do until somebody wishes
	receiveEmpty                       // the descriptor has nothing
	receiveEnded                       // the other side is gone
)

func newConnection(d *Device, i int, f *os.File) (*connection, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("console: connect port %d: %w", i, err)
	}
	c := &connection{d: d, port: i, f: f, raw: raw,
		input: make(chan struct{}, 1), output: make(chan struct{}, 1), ended: make(chan struct{})}
	// Made once, so that moving bytes allocates nothing.
	c.fill = c.fillLocked
	c.writeFD = func(fd uintptr) { c.outN, c.outErr = unix.Write(int(fd), c.out) }
	return c, nil
}

// start begins the goroutines. Device.mu is held, so that Close sees them.
func (c *connection) start() {
	c.d.pumps.Add(2)
	c.wantInput()
	go c.receive()
	go c.awaitWritable()
}

// close ends the goroutines soon. It may be repeated. The Transport's lock is not held.
func (c *connection) close() {
	c.d.mu.Lock()
	select {
	case <-c.ended:
		c.d.mu.Unlock()
		return
	default:
	}
	close(c.ended)
	c.d.mu.Unlock()
	c.f.Close()
}

func wish(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (c *connection) wantInput()  { wish(c.input) }
func (c *connection) wantOutput() { wish(c.output) }

// receive moves bytes to the guest whenever there are some and the guest has room.
func (c *connection) receive() {
	defer c.d.pumps.Done()
	ready := func(fd uintptr) bool {
		c.received, c.fillFD = receiveParked, int(fd)
		if !c.d.bus.Exclusive(c.fill) {
			c.received = receiveParked // Resume wishes again
		}
		if c.failed.Load() {
			c.received = receiveEnded
		}
		return c.received != receiveEmpty
	}
	for {
		select {
		case <-c.input:
		case <-c.ended:
			return
		}
		if err := c.raw.Read(ready); err != nil {
			c.received = receiveEnded // closed
		}
		if c.received == receiveEnded {
			c.d.drop(c)
			c.d.bus.Kick(controlToGuest)
			return
		}
	}
}

// fillLocked reads into the buffers that the guest gave. The Transport's lock is held.
func (c *connection) fillLocked() error {
	p := c.d.ports[c.port]
	q := c.d.bus.Queue(queueToGuest(c.port))
	if !p.guestOpen || c.d.conn(c.port) != c {
		return nil
	}
	for total := 0; ; {
		if total >= maxBurst {
			c.wantInput()
			return nil
		}
		ok, err := q.Pop(&c.d.chain)
		if err != nil {
			return err
		}
		if !ok {
			// Either the guest notifies of new buffers, or the device has had its turn
			// and is called again.
			return nil
		}
		n, err := readInto(c.fillFD, c.d.chain.Writable)
		if n == 0 && c.d.chain.WriteLen > 0 {
			q.Return()
			if errors.Is(err, unix.EAGAIN) {
				c.received = receiveEmpty
			} else {
				c.received = receiveEnded
			}
			return nil
		}
		q.Push(c.d.chain.Head, uint32(n))
		total += n
		c.d.toGuest.Add(uint64(n))
	}
}

// readInto fills buffers with what the descriptor has. It returns an error only if it
// read nothing.
func readInto(fd int, bufs [][]byte) (int, error) {
	total := 0
	for _, b := range bufs {
		b = b[:min(len(b), maxBurst)]
		n, err := unix.Read(fd, b)
		for errors.Is(err, unix.EINTR) {
			n, err = unix.Read(fd, b)
		}
		if n <= 0 {
			if total == 0 && err == nil {
				err = io.EOF
			}
			if total > 0 {
				err = nil // it shows again with the next read
			}
			return total, err
		}
		if total += n; n < len(b) || total >= maxBurst {
			break
		}
	}
	return total, nil
}

// awaitWritable has the queue processed when the descriptor takes bytes again.
func (c *connection) awaitWritable() {
	defer c.d.pumps.Done()
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
		c.d.bus.Kick(queueFromGuest(c.port))
	}
}

// giveUp takes a connection away from its port, with the Transport's lock held, where it
// cannot be closed: that waits for receive, which may wait for the lock.
func (d *Device) giveUp(c *connection) {
	d.mu.Lock()
	if d.conns[c.port] == c {
		d.conns[c.port] = nil
	}
	d.mu.Unlock()
	c.failed.Store(true)
	c.wantInput()
}

// write hands bytes to the descriptor as far as it takes them. The Transport's lock is held.
func (c *connection) write(b []byte) (int, error) {
	for {
		c.out, c.outN, c.outErr = b, 0, nil
		// Control and not Write, which would wait for awaitWritable.
		if err := c.raw.Control(c.writeFD); err != nil {
			return 0, err
		}
		c.out = nil
		if !errors.Is(c.outErr, unix.EINTR) {
			return max(c.outN, 0), c.outErr
		}
	}
}

// transmit moves bytes of port i from the guest to the host. The Transport's lock is held.
func (d *Device) transmit(i int) error {
	c := d.conn(i)
	if c == nil {
		return nil // what is there waits for a connection
	}
	p, q := d.ports[i], d.bus.Queue(queueFromGuest(i))
	for total := 0; ; {
		ok, err := q.Pop(&d.chain)
		if err != nil || !ok {
			return err
		}
		// The guest may have changed a request that was begun: never more than it is long.
		p.sent = min(p.sent, d.chain.ReadLen)
		for _, b := range devices.Skip(d.chain.Readable, p.sent) {
			n, err := c.write(b[:min(len(b), maxBurst)])
			p.sent += uint64(n)
			total += n
			d.fromGuest.Add(uint64(n))
			if n == len(b) && total < maxBurst {
				continue
			}
			if p.sent == d.chain.ReadLen {
				break
			}
			q.Return()
			switch {
			case err == nil && total >= maxBurst:
				q.Yield()
			case err == nil || errors.Is(err, unix.EAGAIN):
				c.wantOutput()
			default:
				d.giveUp(c)
				return d.writeControl()
			}
			return nil
		}
		p.sent = 0
		q.Push(d.chain.Head, 0)
		if total >= maxBurst {
			q.Yield()
			return nil
		}
	}
}
