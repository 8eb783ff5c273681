package console

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/devices/hostfd"
)

// connection is the host's end of a port.
type connection struct {
	*hostfd.FD
	d    *Device
	port int

	// Of the receiving goroutine.
	fill  func() error
	fd    int
	found hostfd.Verdict
}

func newConnection(d *Device, i int, f *os.File) (*connection, error) {
	c := &connection{d: d, port: i}
	c.fill = c.fillLocked // made once, so that moving bytes allocates nothing
	fd, err := hostfd.New(f, hostfd.Config{
		Readable:   c.readable,
		Writable:   func() { d.bus.Kick(queueFromGuest(i)) },
		Ended:      c.end,
		Goroutines: &d.pumps,
	})
	if err != nil {
		return nil, fmt.Errorf("console: connect port %d: %w", i, err)
	}
	c.FD = fd
	return c, nil
}

// end removes a connection that came to its end, unless it was replaced already.
func (c *connection) end() {
	c.d.forget(c)
	c.Close()
	c.d.bus.Kick(controlToGuest)
}

// readable moves bytes to the guest as far as the guest has room.
func (c *connection) readable(fd int) hostfd.Verdict {
	c.found, c.fd = hostfd.Parked, fd
	if !c.d.bus.Exclusive(c.fill) {
		return hostfd.Parked // Resume processes the queue, which wishes again
	}
	return c.found
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
			c.WantInput()
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
		n, err := readInto(c.fd, c.d.chain.Writable)
		if n == 0 && c.d.chain.WriteLen > 0 {
			q.Return()
			c.found = hostfd.Ended
			if errors.Is(err, unix.EAGAIN) {
				c.found = hostfd.Empty
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
		n, err := hostfd.Read(fd, b)
		switch {
		case n <= 0 && total > 0:
			return total, nil // an error shows again with the next read
		case n <= 0 && err == nil:
			return 0, io.EOF
		case n <= 0:
			return 0, err // EAGAIN mostly: not wrapped, which would allocate
		}
		if total += n; n < len(b) || total >= maxBurst {
			break
		}
	}
	return total, nil
}

// transmit moves bytes of port i from the guest to the host. The Transport's lock is held.
func (d *Device) transmit(i int) error {
	c := d.conn(i)
	if c == nil {
		return nil // what is there waits for a connection
	}
	p, q := d.ports[i], d.bus.Queue(queueFromGuest(i))
	for total := uint64(0); total < maxBurst; {
		ok, err := q.Pop(&d.chain)
		if err != nil || !ok {
			return err
		}
		// The guest may have changed a request that was begun: never more than it is long.
		begun := min(p.sent, d.chain.ReadLen)
		p.sent, err = c.send(devices.Skip(d.chain.Readable, begun), begun)
		total += p.sent - begun
		d.fromGuest.Add(p.sent - begun)
		if p.sent == d.chain.ReadLen {
			p.sent = 0
			q.Push(d.chain.Head, 0)
			continue
		}
		q.Return()
		switch {
		case err == nil:
			q.Yield() // enough for now
		case errors.Is(err, unix.EAGAIN):
			c.WantOutput()
		default:
			d.forget(c)
			c.Fail() // and not Close, which waits for a goroutine that may wait for the lock
			return d.writeControl()
		}
		return nil
	}
	q.Yield()
	return nil
}

// send writes buffers, at most maxBurst bytes, and returns sent and how many those were. Without an error
// either all or enough was written.
func (c *connection) send(bufs [][]byte, sent uint64) (uint64, error) {
	left := maxBurst
	for _, b := range bufs {
		b = b[:min(len(b), left)]
		n, err := c.Write(b)
		sent, left = sent+uint64(n), left-n
		if n == len(b) && left > 0 {
			continue
		}
		if n < len(b) && err == nil {
			err = unix.EAGAIN
		}
		return sent, err
	}
	return sent, nil
}
