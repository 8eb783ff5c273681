package vmmhost

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmmwire"
)

// Conn is a connection to the control socket of a process. Calls may be made concurrently;
// the process carries them out one after the other.
type Conn struct {
	conn  *net.UnixConn
	hello vmmwire.Hello
	done  chan struct{} // closed when the connection is over

	mu sync.Mutex
	// All below is guarded by mu.
	seq     uint32
	waiting map[uint32]chan vmmwire.Message
	ended   *vmmwire.Ended
	err     error
}

// NewConn greets over a fresh connection, which it owns.
func NewConn(ctx context.Context, c *net.UnixConn) (*Conn, error) {
	stop := context.AfterFunc(ctx, func() { c.Close() })
	m, err := receive(c, make([]byte, vmmwire.MaxMessage+1))
	if !stop() && err != nil {
		return nil, fmt.Errorf("greet VMM: %w", ctx.Err())
	}
	hello, ok := m.message.(*vmmwire.Hello)
	switch {
	case err == nil && !ok:
		err = errdefs.New(errdefs.ErrGuest, "it did not say hello")
	case err == nil && hello.Version != vmmwire.Version:
		err = errdefs.New(errdefs.ErrIncompatible, "it speaks version %d of the protocol, not %d", hello.Version, vmmwire.Version)
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("greet VMM: %w", err)
	}
	n := &Conn{conn: c, hello: *hello, done: make(chan struct{}), waiting: map[uint32]chan vmmwire.Message{}}
	go n.read()
	return n, nil
}

// Hello is what the process said of itself.
func (c *Conn) Hello() vmmwire.Hello { return c.hello }

// Done is closed when the connection is over; Ended then tells why the machine ended, if
// the process said so.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Ended returns the machine's end, or nil if it was not told.
func (c *Conn) Ended() *vmmwire.Ended {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// Close ends the connection. The machine goes on.
func (c *Conn) Close() error {
	err := c.conn.Close()
	<-c.done
	return err
}

// Call sends a request with descriptors and waits for its reply. A reply that says that the
// request failed becomes an error of its class. The files stay the caller's.
func (c *Conn) Call(ctx context.Context, m vmmwire.Message, files ...*os.File) (vmmwire.Message, error) {
	reply, seq, err := c.send(m, files)
	if err != nil {
		select {
		case <-c.done:
			return nil, c.failure()
		default:
			return nil, fmt.Errorf("ask VMM: %w", err)
		}
	}
	select {
	case r := <-reply:
		if f, failed := r.(*vmmwire.Failed); failed {
			return nil, errdefs.As(errdefs.FromCode(f.Code), errors.New(f.Text))
		}
		return r, nil
	case <-c.done:
		return nil, c.failure()
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.waiting, seq)
		c.mu.Unlock()
		return nil, fmt.Errorf("ask VMM: %w", ctx.Err())
	}
}

// failure says why the connection is over.
func (c *Conn) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended != nil {
		return errdefs.New(errdefs.ErrGuest, "the machine has ended: %s", c.ended.Reason)
	}
	return fmt.Errorf("ask VMM: %w", c.err)
}

// Do is Call for requests whose reply has no content.
func (c *Conn) Do(ctx context.Context, m vmmwire.Message, files ...*os.File) error {
	r, err := c.Call(ctx, m, files...)
	if err != nil {
		return err
	}
	if s, ok := r.(*vmmwire.Simple); !ok || s.Of != vmmwire.KindDone {
		return errdefs.New(errdefs.ErrGuest, "VMM answered with a message of kind %d", r.Kind())
	}
	return nil
}

func (c *Conn) send(m vmmwire.Message, files []*os.File) (chan vmmwire.Message, uint32, error) {
	fds := make([]int, 0, len(files))
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	c.mu.Lock()
	c.seq++
	seq, reply := c.seq, make(chan vmmwire.Message, 1)
	c.waiting[seq] = reply
	c.mu.Unlock()
	b, err := vmmwire.Encode(seq, m)
	if err != nil {
		return nil, 0, err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = syscall.UnixRights(fds...)
	}
	if _, _, err := c.conn.WriteMsgUnix(b, rights, nil); err != nil {
		return nil, 0, errdefs.As(errdefs.ErrUnavailable, err)
	}
	return reply, seq, nil
}

type received struct {
	seq     uint32
	message vmmwire.Message
}

// receive reads one packet. No packet of a VMM carries descriptors: without room for
// control data the kernel closes what comes.
func receive(c *net.UnixConn, buf []byte) (received, error) {
	n, _, _, _, err := c.ReadMsgUnix(buf, nil)
	if err != nil {
		return received{}, errdefs.As(errdefs.ErrUnavailable, err)
	}
	if n == 0 {
		return received{}, errdefs.New(errdefs.ErrUnavailable, "the process ended or closed its connection")
	}
	seq, m, err := vmmwire.Decode(buf[:n], 0)
	if err != nil {
		return received{}, errdefs.As(errdefs.ErrGuest, err)
	}
	return received{seq, m}, nil
}

// read hands replies to those who wait until the connection is over.
func (c *Conn) read() {
	defer close(c.done)
	defer c.conn.Close()
	buf := make([]byte, vmmwire.MaxMessage+1)
	for {
		r, err := receive(c.conn, buf)
		c.mu.Lock()
		if err != nil {
			c.err = err
			c.mu.Unlock()
			return
		}
		if e, ok := r.message.(*vmmwire.Ended); ok && c.ended == nil {
			c.ended = e
		}
		if w := c.waiting[r.seq]; w != nil && r.seq != 0 {
			delete(c.waiting, r.seq)
			w <- r.message
		}
		c.mu.Unlock()
	}
}
