// Package link is one connection of the agent channel after its handshake: a
// sender that interleaves long bodies fairly, so that a reply of many megabytes
// never delays a ping, and byte streams with credit-based flow control, each a
// net.Conn. Both sides of the channel use it; the reading of frames and the
// meaning of calls stay with them.
//
// Whoever makes a Link closes it; Close ends every stream and pending Send and
// joins the sender's goroutine. Memory is bounded: by StreamWindow per stream,
// by MaxStreams, and by what the callers of Send hold.
//
// Lock order: Link.mu, then Stream.mu; sender.mu is never held with another.
package link

import (
	"context"
	"encoding/binary"
	"slices"
	"sync"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// Config says how a Link works.
type Config struct {
	// Write hands one encoded frame to the transport. It is called by one
	// goroutine at a time and must return soon after Interrupt is called.
	Write func(p []byte) error
	// Interrupt makes a running Write return. It may be called more than once.
	Interrupt func()
	// Accept is called for a stream that the peer opens, in the goroutine that
	// calls Handle; it must answer with Stream.Accept or Stream.Refuse, then or
	// later. Nil: the peer may open none.
	Accept func(s *Stream)
	// MaxStreams bounds open streams; 0 means 256.
	MaxStreams int
}

// Link is one live connection. Its methods may be called concurrently, except Handle.
type Link struct {
	cfg    Config
	sender sender
	done   chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	streams map[uint32]*Stream
	// +checklocks:mu
	err error
	// +checklocks:mu
	stray int // bytes of stream frames that may still come for closed streams
}

// New starts a link.
func New(cfg Config) *Link {
	if cfg.MaxStreams == 0 {
		cfg.MaxStreams = 256
	}
	l := &Link{cfg: cfg, done: make(chan struct{}), streams: make(map[uint32]*Stream)}
	l.sender.start(cfg.Write, l.fail)
	return l
}

// Done is closed when the link has ended; Err then says why.
func (l *Link) Done() <-chan struct{} { return l.done }

// Err returns why the link ended, or nil.
func (l *Link) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// fail ends the link without joining the sender.
func (l *Link) fail(err error) {
	l.mu.Lock()
	if l.err != nil {
		l.mu.Unlock()
		return
	}
	l.err = err
	streams := l.streams
	l.streams = nil
	close(l.done)
	l.mu.Unlock()
	l.sender.stop(err)
	l.cfg.Interrupt()
	for _, s := range streams {
		s.end(err)
	}
}

// Close ends the link for the reason err and joins the sender. It may be repeated.
func (l *Link) Close(err error) {
	l.fail(err)
	<-l.sender.exited
}

// Send sends a coded body (call, reply or note), the concatenation of parts, split
// into frames as needed and in turn with other bodies. It returns when all is
// handed to the transport, or ctx or the link has ended; the bool says whether a
// part of it had been sent.
func (l *Link) Send(ctx context.Context, t agentwire.FrameType, id uint32, code byte, parts ...[]byte) (bool, error) {
	return l.sender.send(ctx, &item{t: t, id: id, coded: true, code: code, rest: slices.Clone(parts), done: make(chan error, 1)})
}

// Post queues a small frame ahead of long bodies, without waiting.
func (l *Link) Post(t agentwire.FrameType, id uint32, payload []byte) {
	if !l.sender.post(&item{t: t, id: id, rest: [][]byte{payload}}) {
		l.fail(errdefs.New(errdefs.ErrGuest, "peer makes more answers than it reads"))
	}
}

// PostCoded queues a small coded frame (a note, or a short reply) as Post does.
func (l *Link) PostCoded(t agentwire.FrameType, id uint32, code byte, body []byte) {
	l.Post(t, id, append([]byte{0, code}, body...))
}

// Handle takes a stream frame (open, data, window, close). An error means the
// peer broke the protocol: the link should be closed with it.
func (l *Link) Handle(f agentwire.Frame) error {
	if f.Type == agentwire.FrameOpen {
		return l.handleOpen(f)
	}
	l.mu.Lock()
	s := l.streams[f.ID]
	if s == nil {
		defer l.mu.Unlock()
		return l.strayLocked(f)
	}
	l.mu.Unlock()
	switch f.Type {
	case agentwire.FrameStreamData:
		return s.handleData(f.Payload)
	case agentwire.FrameWindow:
		if len(f.Payload) != 4 {
			return broken("window frame of %d bytes", len(f.Payload))
		}
		return s.handleWindow(binary.LittleEndian.Uint32(f.Payload))
	case agentwire.FrameClose:
		return s.handleClose(f.Payload)
	}
	return broken("frame type %d", f.Type)
}

// strayLocked bounds frames for streams that are closed here but perhaps not yet
// there.
func (l *Link) strayLocked(f agentwire.Frame) error {
	l.stray -= len(f.Payload) + strayFrame
	if l.stray < 0 && l.err == nil {
		return broken("frame for stream %d that does not exist", f.ID)
	}
	return nil
}

// strayFrame is the cost of a frame in the account of stray bytes, besides its payload.
const strayFrame = 64

func (l *Link) handleOpen(f agentwire.Frame) error {
	if l.cfg.Accept == nil || len(f.Payload) < 4 || len(f.Payload) > 260 {
		return broken("open frame of %d bytes", len(f.Payload))
	}
	s := newStream(l, f.ID, string(f.Payload[4:]))
	s.credit = min(int64(binary.LittleEndian.Uint32(f.Payload)), maxCredit)
	l.mu.Lock()
	switch {
	case l.err != nil:
		l.mu.Unlock()
		return nil
	case l.streams[f.ID] != nil:
		l.mu.Unlock()
		return broken("stream %d opened twice", f.ID)
	case len(l.streams) >= l.cfg.MaxStreams:
		l.mu.Unlock()
		l.Post(agentwire.FrameClose, f.ID, closePayload(agentwire.CloseAbort, "too many streams"))
		return nil
	}
	l.streams[f.ID] = s
	l.mu.Unlock()
	l.cfg.Accept(s)
	return nil
}

// Open opens a stream of kind under id, which the caller has not used before,
// and waits until the peer accepts it.
func (l *Link) Open(ctx context.Context, id uint32, kind string) (*Stream, error) {
	s := newStream(l, id, kind)
	l.mu.Lock()
	switch {
	case l.err != nil:
		err := l.err
		l.mu.Unlock()
		return nil, err
	case len(l.streams) >= l.cfg.MaxStreams:
		l.mu.Unlock()
		return nil, errdefs.New(errdefs.ErrResourceExhausted, "%d streams are open", l.cfg.MaxStreams)
	}
	l.streams[id] = s
	l.mu.Unlock()
	l.Post(agentwire.FrameOpen, id, append(binary.LittleEndian.AppendUint32(nil, agentwire.StreamWindow), kind...))
	select {
	case <-s.accepted:
	case <-s.ended:
	case <-ctx.Done():
		s.abort(ctx.Err())
		return nil, ctx.Err()
	}
	select {
	case <-s.accepted:
		return s, nil
	default:
		return nil, s.endErr()
	}
}

// forget takes a stream out of the table and allows for frames under way to it.
func (l *Link) forget(id uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.streams[id] != nil {
		delete(l.streams, id)
		// A window of data in frames as small as a byte would be abuse; 64 frames
		// beside whole chunks are not.
		l.stray = min(l.stray+agentwire.StreamWindow+strayFrame*strayFrame, 64<<20)
	}
}

func broken(format string, args ...any) error {
	return errdefs.New(errdefs.ErrGuest, "agent channel: "+format, args...)
}
