package link

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// maxCredit bounds what a peer may let us send at once.
const maxCredit = 16 << 20

// Stream is one byte stream: a net.Conn with half-close. A reader that stops
// reading stalls only its own stream.
type Stream struct {
	link     *Link
	id       uint32
	kind     string
	accepted chan struct{}
	ended    chan struct{} // aborted by either side, or the link is gone
	readable chan struct{}
	writable chan struct{}
	writing  chan struct{} // holds a token while a Write is running
	readBy   deadline
	writeBy  deadline

	mu sync.Mutex
	// +checklocks:mu
	isAccepted bool
	// +checklocks:mu
	in []byte // received and not read
	// +checklocks:mu
	owed int // read and not yet given back as credit
	// +checklocks:mu
	inEnd bool // peer sends no more
	// +checklocks:mu
	outEnd bool // we send no more
	// +checklocks:mu
	credit int64
	// +checklocks:mu
	err error // of an abort
}

func newStream(l *Link, id uint32, kind string) *Stream {
	return &Stream{
		link: l, id: id, kind: kind,
		accepted: make(chan struct{}), ended: make(chan struct{}),
		readable: make(chan struct{}, 1), writable: make(chan struct{}, 1), writing: make(chan struct{}, 1),
		readBy: makeDeadline(), writeBy: makeDeadline(),
	}
}

// Kind is what the stream was opened for.
func (s *Stream) Kind() string { return s.kind }

// Done is closed when either side aborted the stream or the link has ended; a
// stream whose both directions ended in order need not be done.
func (s *Stream) Done() <-chan struct{} { return s.ended }

// Accept takes a stream that the peer opened.
func (s *Stream) Accept() {
	s.link.Post(agentwire.FrameWindow, s.id, binary.LittleEndian.AppendUint32(nil, agentwire.StreamWindow))
}

// Refuse rejects a stream that the peer opened, with a text for it.
func (s *Stream) Refuse(why string) {
	s.end(errdefs.New(errdefs.ErrUnavailable, "%s", why))
	s.link.forget(s.id)
	s.link.Post(agentwire.FrameClose, s.id, closePayload(agentwire.CloseAbort, why))
}

func closePayload(mode byte, text string) []byte {
	return append([]byte{mode}, text[:min(len(text), 512)]...)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// end marks the stream as over without telling the peer.
func (s *Stream) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
		close(s.ended)
	}
}

func (s *Stream) endErr() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// abort ends the stream and tells the peer.
func (s *Stream) abort(err error) {
	s.end(err)
	s.link.forget(s.id)
	s.link.Post(agentwire.FrameClose, s.id, closePayload(agentwire.CloseAbort, ""))
}

func (s *Stream) handleData(p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.inEnd:
		return broken("data after the end of stream %d", s.id)
	case len(s.in)+s.owed+len(p) > agentwire.StreamWindow:
		return broken("stream %d exceeds its window", s.id)
	}
	s.in = append(s.in, p...)
	signal(s.readable)
	return nil
}

func (s *Stream) handleWindow(n uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.isAccepted {
		s.isAccepted = true
		close(s.accepted)
	}
	s.credit += int64(n)
	if s.credit > maxCredit {
		return broken("stream %d has a window of %d bytes", s.id, s.credit)
	}
	signal(s.writable)
	return nil
}

func (s *Stream) handleClose(p []byte) error {
	if len(p) < 1 || len(p) > 513 {
		return broken("close frame of %d bytes", len(p))
	}
	if p[0] == agentwire.CloseAbort {
		s.link.forget(s.id)
		told := agentwire.CallError{Code: errdefs.Code(errdefs.ErrUnavailable), Message: string(p[1:])}
		if told.Message == "" {
			told.Message = "closed by peer"
		}
		s.end(errdefs.As(errdefs.ErrUnavailable, &streamError{kind: s.kind, err: told.Err()}))
		return nil
	}
	s.mu.Lock()
	s.inEnd = true
	over := s.outEnd
	s.mu.Unlock()
	signal(s.readable)
	if over {
		s.link.forget(s.id)
	}
	return nil
}

type streamError struct {
	kind string
	err  error
}

func (e *streamError) Error() string { return "stream " + e.kind + ": " + e.err.Error() }

// Read implements net.Conn.
func (s *Stream) Read(p []byte) (int, error) {
	for {
		n, err := s.readNow(p)
		if n > 0 || err != nil || len(p) == 0 {
			return n, err
		}
		select {
		case <-s.readable:
		case <-s.ended:
		case <-s.readBy.wait():
			return 0, os.ErrDeadlineExceeded
		}
	}
}

func (s *Stream) readNow(p []byte) (int, error) {
	if s.readBy.passed() {
		return 0, os.ErrDeadlineExceeded
	}
	s.mu.Lock()
	n := copy(p, s.in)
	s.in = s.in[n:]
	if len(s.in) == 0 {
		s.in = nil
	}
	s.owed += n
	var give uint32
	if s.owed >= agentwire.StreamWindow/2 && !s.inEnd {
		give, s.owed = uint32(s.owed), 0
	}
	inEnd, err := s.inEnd, s.err
	more := len(s.in) > 0 || inEnd
	s.mu.Unlock()
	if give > 0 && err == nil {
		s.link.Post(agentwire.FrameWindow, s.id, binary.LittleEndian.AppendUint32(nil, give))
	}
	switch {
	case n > 0:
		if more {
			signal(s.readable)
		}
		return n, nil
	case inEnd:
		signal(s.readable)
		return 0, io.EOF
	}
	return 0, err
}

// Write implements net.Conn.
func (s *Stream) Write(p []byte) (int, error) {
	select {
	case s.writing <- struct{}{}:
		defer func() { <-s.writing }()
	case <-s.ended:
		return 0, s.endErr()
	case <-s.writeBy.wait():
		return 0, os.ErrDeadlineExceeded
	}
	sent := 0
	for sent < len(p) {
		n, err := s.takeCredit(len(p) - sent)
		if err != nil {
			return sent, err
		}
		if n > 0 {
			if err := s.sendChunk(p[sent : sent+n]); err != nil {
				return sent, err
			}
			sent += n
			continue
		}
		select {
		case <-s.writable:
		case <-s.ended:
		case <-s.writeBy.wait():
			return sent, os.ErrDeadlineExceeded
		}
	}
	return sent, nil
}

func (s *Stream) takeCredit(want int) (int, error) {
	if s.writeBy.passed() {
		return 0, os.ErrDeadlineExceeded
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != nil:
		return 0, s.err
	case s.outEnd:
		return 0, net.ErrClosed
	}
	n := min(int64(want), s.credit, agentwire.ChunkSize)
	s.credit -= n
	return int(n), nil
}

// sendChunk returns once the transport has the chunk, so that a CLOSE posted
// later cannot overtake it. A chunk in the hands of the transport is not taken
// back, so the deadline acts between chunks only.
func (s *Stream) sendChunk(p []byte) error {
	_, err := s.link.sender.send(context.Background(), &item{t: agentwire.FrameStreamData, id: s.id, rest: [][]byte{p}, done: make(chan error, 1)})
	return err
}

// CloseWrite ends what we send; reading goes on.
func (s *Stream) CloseWrite() error {
	s.mu.Lock()
	already, over := s.outEnd || s.err != nil, s.inEnd
	s.outEnd = true
	s.mu.Unlock()
	if already {
		return nil
	}
	s.link.Post(agentwire.FrameClose, s.id, closePayload(agentwire.CloseWrite, ""))
	if over {
		s.link.forget(s.id)
	}
	return nil
}

// Close implements net.Conn. What was not read is dropped.
func (s *Stream) Close() error {
	s.mu.Lock()
	live := s.err == nil
	whole := s.inEnd && s.outEnd
	s.mu.Unlock()
	switch {
	case !live:
	case whole:
		s.end(net.ErrClosed)
	default:
		s.abort(net.ErrClosed)
	}
	return nil
}

// LocalAddr implements net.Conn.
func (s *Stream) LocalAddr() net.Addr { return addr(s.kind) }

// RemoteAddr implements net.Conn.
func (s *Stream) RemoteAddr() net.Addr { return addr(s.kind) }

// SetDeadline implements net.Conn.
func (s *Stream) SetDeadline(t time.Time) error {
	s.readBy.set(t)
	s.writeBy.set(t)
	return nil
}

// SetReadDeadline implements net.Conn.
func (s *Stream) SetReadDeadline(t time.Time) error {
	s.readBy.set(t)
	return nil
}

// SetWriteDeadline implements net.Conn.
func (s *Stream) SetWriteDeadline(t time.Time) error {
	s.writeBy.set(t)
	return nil
}

type addr string

func (a addr) Network() string { return "forkd-agent" }
func (a addr) String() string  { return string(a) }
