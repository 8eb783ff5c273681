package kvm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmwire"
)

// maxReply bounds what a monitor sends: no reply is longer.
const maxReply = 16 << 10

// helloPatience bounds the wait for the first message of a process that was just started.
const helloPatience = 20 * time.Second

// client is a connection to a monitor's control socket. The monitor may have been taken over by its
// guest: nothing it sends is believed further than it can be checked.
type client struct {
	conn  *net.UnixConn
	hello vmmwire.Hello
	ended func(vmmwire.Ended) // called from the reader

	turn turn // held for one request and its reply
	seq  uint32

	replies chan reply
	done    chan struct{} // closed when the connection is over
	mu      sync.Mutex
	// +checklocks:mu
	err error // why it is over
}

type reply struct {
	seq uint32
	m   vmmwire.Message
}

// dial connects to the control socket at path and reads the greeting.
func dial(ctx context.Context, path string, ended func(vmmwire.Ended)) (*client, error) {
	conn, err := linux.DialPackets(ctx, path)
	if err != nil {
		return nil, errdefs.As(errdefs.ErrUnavailable, err)
	}
	c := &client{conn: conn, ended: ended, turn: newTurn(), replies: make(chan reply, 1), done: make(chan struct{})}
	ctx, cancel := context.WithTimeout(ctx, helloPatience)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	_, m, err := c.receive(make([]byte, maxReply))
	if !stop() || ctx.Err() != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("wait for the monitor's greeting: %w", errors.Join(ctx.Err(), err))
	}
	hello, ok := m.(*vmmwire.Hello)
	switch {
	case err != nil:
		err = fmt.Errorf("wait for the monitor's greeting: %w", errdefs.As(errdefs.ErrUnavailable, err))
	case !ok:
		err = errdefs.New(errdefs.ErrGuest, "the monitor's first message is of kind %d", m.Kind())
	case hello.Version != vmmwire.Version:
		err = errdefs.New(errdefs.ErrIncompatible, "the monitor speaks version %d of the control protocol, this forkd %d", hello.Version, vmmwire.Version)
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	c.hello = *hello
	go c.read()
	return c, nil
}

// receive reads one message.
func (c *client) receive(buf []byte) (uint32, vmmwire.Message, error) {
	n, err := c.conn.Read(buf)
	if err == nil && n == 0 {
		err = errors.New("the monitor closed the connection")
	}
	if err != nil {
		return 0, nil, err
	}
	return vmmwire.Decode(buf[:n], 0)
}

// read is the connection's reader. It ends with the connection.
func (c *client) read() {
	defer close(c.done)
	buf := make([]byte, maxReply)
	for {
		seq, m, err := c.receive(buf)
		if err != nil {
			c.fail(err)
			return
		}
		if e, ok := m.(*vmmwire.Ended); ok {
			c.ended(*e)
			continue
		}
		select {
		case c.replies <- reply{seq, m}:
		default:
			c.fail(errdefs.New(errdefs.ErrGuest, "the monitor sent a reply that nobody waits for"))
			return
		}
	}
}

func (c *client) fail(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.mu.Unlock()
	_ = c.conn.Close()
}

func (c *client) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return errdefs.As(errdefs.ErrUnavailable, c.err)
}

// call sends a request with files and returns its reply. A call that is given up ends the
// connection, because its reply would be taken for that of the next.
func (c *client) call(ctx context.Context, m vmmwire.Message, files []*os.File) (vmmwire.Message, error) {
	if err := c.turn.take(ctx); err != nil {
		return nil, err
	}
	defer c.turn.give()
	c.seq++
	packet, err := vmmwire.Encode(c.seq, m)
	if err != nil {
		return nil, err
	}
	if err := c.send(packet, files); err != nil {
		c.fail(err)
		return nil, fmt.Errorf("send to the monitor: %w", errdefs.As(errdefs.ErrUnavailable, err))
	}
	select {
	case r := <-c.replies:
		return c.check(r)
	case <-c.done:
		return nil, fmt.Errorf("wait for the monitor: %w", c.failure())
	case <-ctx.Done():
		c.fail(ctx.Err())
		return nil, fmt.Errorf("wait for the monitor: %w", ctx.Err())
	}
}

func (c *client) check(r reply) (vmmwire.Message, error) {
	if r.seq != c.seq {
		err := errdefs.New(errdefs.ErrGuest, "the monitor replied to request %d, not %d", r.seq, c.seq)
		c.fail(err)
		return nil, err
	}
	if f, ok := r.m.(*vmmwire.Failed); ok {
		return nil, errdefs.New(errdefs.FromCode(f.Code), "%s", f.Text)
	}
	return r.m, nil
}

func (c *client) send(packet []byte, files []*os.File) error {
	if len(files) > vmmwire.MaxFiles {
		return errdefs.New(errdefs.ErrInvalid, "%d files, a message takes %d", len(files), vmmwire.MaxFiles)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	n, _, err := c.conn.WriteMsgUnix(packet, oob, nil)
	if err == nil && n != len(packet) {
		err = fmt.Errorf("%d of %d bytes were sent", n, len(packet))
	}
	return err
}

// drain reads what has arrived and ends the connection.
func (c *client) drain() {
	// Reads of what is there already succeed; the first that would wait fails.
	_ = c.conn.SetReadDeadline(time.Now().Add(drainTime))
	<-c.done
}

// drainTime is enough to read what has arrived.
const drainTime = 10 * time.Millisecond

// turn is a mutex that can be waited for with a context.
type turn chan struct{}

func newTurn() turn { return make(turn, 1) }

func (t turn) take(ctx context.Context) error {
	select {
	case t <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t turn) give() { <-t }
