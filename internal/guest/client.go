// Package guest is the daemon's side of the agent channel: it connects to the
// forkd-agent of one sandbox and calls it.
//
// The guest is hostile. Everything it sends is bounded and checked: a reply may
// not exceed what its call allows, a frame nobody asked for ends the connection,
// a guest that stops reading is given up after a time. Such ends have the class
// ErrGuest; a connection that is just gone has ErrUnavailable. What a guest says
// is a claim, except the clock offset of a receipt, which the host measures.
//
// A [Client] owns its connection. Calls may be made concurrently and end with
// their context; Close ends them all and joins the client's goroutines.
package guest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/agentwire/link"
	"forkd.dev/forkd/internal/errdefs"
)

// Options tune a client. The zero value is right.
type Options struct {
	// HelloEvery is the time between repeated HELLOs; 0 means 75 ms.
	HelloEvery time.Duration
	// StallTimeout is how long the guest may refuse to read; 0 means 30 s.
	StallTimeout time.Duration
	// Now is the host's wall clock; nil means time.Now.
	Now func() time.Time
}

// Supported lists the agent protocol versions that this build serves.
func Supported() []int { return []int{agentwire.Version} }

// Client is one connection to an agent.
type Client struct {
	conn  net.Conn
	opts  Options
	nonce [16]byte
	link  *link.Link
	acked chan agentwire.HelloAck
	done  chan struct{} // the reader has ended
	hello agentwire.HelloAck
	web   *http.Client

	mu sync.Mutex
	// +checklocks:mu
	lastID uint32
	// +checklocks:mu
	calls map[uint32]*call
	// +checklocks:mu
	abandoned int // calls that were given up and not yet answered
}

// Connect says hello on conn until the agent answers or ctx ends. It owns conn
// from the start, and closes it on an error.
func Connect(ctx context.Context, conn net.Conn, opts Options) (*Client, error) {
	if opts.HelloEvery == 0 {
		opts.HelloEvery = 75 * time.Millisecond
	}
	if opts.StallTimeout == 0 {
		opts.StallTimeout = 30 * time.Second
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	c := &Client{
		conn: conn, opts: opts, calls: make(map[uint32]*call),
		acked: make(chan agentwire.HelloAck, 1), done: make(chan struct{}),
	}
	rand.Read(c.nonce[:]) // never fails
	c.link = link.New(link.Config{Write: c.write, Interrupt: func() { conn.Close() }})
	c.web = newHTTPClient(c)
	go func() {
		defer close(c.done)
		c.link.Close(c.read())
	}()
	if err := c.handshake(ctx); err != nil {
		c.shut(err)
		return nil, fmt.Errorf("connect to agent: %w", err)
	}
	return c, nil
}

// handshake repeats HELLO: a guest may lose one while its port is being opened.
func (c *Client) handshake(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { c.conn.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	hello := agentwire.Hello{Nonce: c.nonce, Version: slices.Max(Supported())}
	frame := agentwire.AppendFrame([]byte{agentwire.Mark}, agentwire.FrameHello, 0, hello.Append(nil))
	again := time.NewTicker(c.opts.HelloEvery)
	defer again.Stop()
	for {
		if err := c.write(frame); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}
		select {
		case ack := <-c.acked:
			if !slices.Contains(Supported(), ack.Version) {
				return errdefs.New(errdefs.ErrIncompatible, "agent %.40q speaks protocol version %d, this build %v", ack.AgentVersion, ack.Version, Supported())
			}
			c.hello = ack
			return nil
		case <-again.C:
		case <-c.link.Done():
			return c.link.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// AgentVersion returns the version that the agent told.
func (c *Client) AgentVersion() string { return c.hello.AgentVersion }

// Protocol returns the protocol version in use.
func (c *Client) Protocol() int { return c.hello.Version }

// Done is closed when the connection has ended; Err then says why.
func (c *Client) Done() <-chan struct{} { return c.link.Done() }

// Err returns why the connection ended, or nil.
func (c *Client) Err() error { return c.link.Err() }

// Close ends the connection and every call on it. It may be repeated.
func (c *Client) Close() error {
	c.shut(errdefs.As(errdefs.ErrCanceled, net.ErrClosed))
	c.web.CloseIdleConnections()
	return nil
}

func (c *Client) shut(err error) {
	c.link.Close(err)
	c.conn.Close()
	<-c.done
}

// write hands bytes to the connection; a guest that takes none for StallTimeout
// loses it.
func (c *Client) write(p []byte) error {
	c.conn.SetWriteDeadline(time.Now().Add(c.opts.StallTimeout))
	_, err := c.conn.Write(p)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errdefs.New(errdefs.ErrGuest, "the guest read nothing for %s", c.opts.StallTimeout)
	}
	return errdefs.New(errdefs.ErrUnavailable, "write to agent: %w", err)
}

// read takes frames until the connection ends. Before the answer to our HELLO
// everything is dropped: it belongs to an earlier connection.
func (c *Client) read() error {
	reader := agentwire.NewReader(c.conn)
	var h greeting
	for {
		f, err := reader.Next()
		var damaged *agentwire.DamagedError
		switch {
		case errors.As(err, &damaged):
			if h.acked {
				return errdefs.New(errdefs.ErrGuest, "agent channel: %v", err)
			}
			continue
		case errors.Is(err, io.EOF):
			return errdefs.New(errdefs.ErrUnavailable, "the guest ended the connection")
		case err != nil:
			return errdefs.New(errdefs.ErrUnavailable, "read from agent: %w", err)
		}
		if f.Type == agentwire.FrameHelloAck {
			if err := c.takeAck(f, &h); err != nil {
				return err
			}
			continue
		}
		if !h.acked {
			continue
		}
		if err := c.handle(f); err != nil {
			return err
		}
	}
}

// greeting is what came of our HELLO so far.
type greeting struct {
	acked bool
	extra int // answers after the first
}

func (c *Client) takeAck(f agentwire.Frame, h *greeting) error {
	var ack agentwire.HelloAck
	if ack.Decode(f.Payload) != nil || ack.Nonce != c.nonce {
		if h.acked {
			return errdefs.New(errdefs.ErrGuest, "agent channel: answer to a hello that was not sent")
		}
		return nil
	}
	if !h.acked {
		h.acked = true
		c.acked <- ack
		return nil
	}
	// One for every repeated HELLO is right.
	if h.extra++; h.extra > maxExtraAcks {
		return errdefs.New(errdefs.ErrGuest, "agent channel: too many answers to hello")
	}
	return nil
}

const maxExtraAcks = 10000

func (c *Client) handle(f agentwire.Frame) error {
	switch f.Type {
	case agentwire.FrameReply, agentwire.FrameNote:
		return c.handleReply(f)
	case agentwire.FrameStreamData, agentwire.FrameWindow, agentwire.FrameClose:
		return c.link.Handle(f)
	}
	return errdefs.New(errdefs.ErrGuest, "agent channel: unexpected frame of type %d", f.Type)
}
