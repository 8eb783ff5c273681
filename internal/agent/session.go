package agent

import (
	"context"
	"sync"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/agentwire/link"
	"forkd.dev/forkd/internal/errdefs"
)

// maxCalls bounds calls in progress on a connection.
const maxCalls = 128

// session is one connection of the daemon: its link and the calls made on it.
type session struct {
	agent *Agent
	nonce [16]byte
	link  *link.Link

	mu sync.Mutex
	// +checklocks:mu
	calls map[uint32]*call
	// +checklocks:mu
	incoming int // bytes of bodies not yet complete
}

// call is one call in progress.
type call struct {
	session *session
	id      uint32
	method  agentwire.Method
	body    []byte
	whole   bool
	cancel  context.CancelFunc
	notes   chan note
}

// note is something the peer said within a call.
type note struct {
	code byte
	body []byte
}

func newSession(a *Agent, nonce [16]byte) *session {
	s := &session{agent: a, nonce: nonce, calls: make(map[uint32]*call)}
	s.link = link.New(link.Config{Write: a.cfg.Channel.write, Interrupt: a.cfg.Channel.interrupt, Accept: s.accept})
	return s
}

// end drops the connection. Its calls go on: a program ends by itself or by its
// timeout, and its result is dropped.
func (s *session) end() {
	s.link.Close(errdefs.New(errdefs.ErrUnavailable, "connection replaced"))
}

// handle takes one frame.
func (s *session) handle(f agentwire.Frame) error {
	switch f.Type {
	case agentwire.FrameCall:
		return s.handleCall(f)
	case agentwire.FrameNote:
		s.handleNote(f)
	case agentwire.FrameCancel:
		s.mu.Lock()
		c := s.calls[f.ID]
		if c != nil && !c.whole {
			s.incoming -= len(c.body)
			delete(s.calls, f.ID)
		}
		s.mu.Unlock()
		if c != nil && c.whole {
			c.cancel()
		}
	case agentwire.FrameOpen, agentwire.FrameStreamData, agentwire.FrameWindow, agentwire.FrameClose:
		return s.link.Handle(f)
	}
	return nil // a frame type of a later version
}

func (s *session) handleCall(f agentwire.Frame) error {
	flags, code, body, ok := f.Coded()
	if !ok {
		return errdefs.New(errdefs.ErrInvalid, "call frame of %d bytes", len(f.Payload))
	}
	s.mu.Lock()
	c := s.calls[f.ID]
	switch {
	case c != nil && c.whole:
		s.mu.Unlock()
		return errdefs.New(errdefs.ErrInvalid, "call %d made twice", f.ID)
	case c == nil && len(s.calls) >= maxCalls:
		s.mu.Unlock()
		if flags&agentwire.FlagMore == 0 {
			s.refuse(f.ID, errdefs.New(errdefs.ErrResourceExhausted, "%d calls are in progress", maxCalls))
		}
		return nil
	case c == nil:
		c = &call{session: s, id: f.ID, method: agentwire.Method(code), notes: make(chan note, 8)}
		s.calls[f.ID] = c
	}
	s.incoming += len(body)
	if s.incoming > agentwire.MaxRequest {
		s.mu.Unlock()
		return errdefs.New(errdefs.ErrResourceExhausted, "calls of more than %d bytes", agentwire.MaxRequest)
	}
	c.body = append(c.body, body...)
	if flags&agentwire.FlagMore != 0 {
		s.mu.Unlock()
		return nil
	}
	s.incoming -= len(c.body)
	c.whole = true
	var ctx context.Context
	ctx, c.cancel = context.WithCancel(s.agent.ctx)
	s.mu.Unlock()
	s.agent.calls.Add(1)
	s.agent.worker.run(func() { c.run(ctx) })
	return nil
}

func (s *session) handleNote(f agentwire.Frame) {
	_, code, body, ok := f.Coded()
	if !ok {
		return
	}
	s.mu.Lock()
	c := s.calls[f.ID]
	s.mu.Unlock()
	if c == nil {
		return
	}
	select {
	case c.notes <- note{code: code, body: append([]byte(nil), body...)}:
	default: // more notes than any method asks for
	}
}

func (s *session) refuse(id uint32, err error) {
	told := agentwire.NewCallError(err)
	s.link.PostCoded(agentwire.FrameReply, id, agentwire.StatusError, told.Append(nil))
}

// run answers the call. The reply is sent also after a cancel.
func (c *call) run(ctx context.Context) {
	s := c.session
	defer s.agent.calls.Done()
	defer c.cancel()
	reply, err := s.agent.methods(ctx, c)
	status := byte(agentwire.StatusOK)
	if err != nil {
		told := agentwire.NewCallError(err)
		status, reply = agentwire.StatusError, oneBody(told.Append(nil))
	}
	// The id is free before the reply goes out: the peer may use it again then.
	s.mu.Lock()
	delete(s.calls, c.id)
	s.mu.Unlock()
	s.link.Send(context.Background(), agentwire.FrameReply, c.id, status, reply.body...)
	if reply.after != nil {
		reply.after()
	}
}

// answer is what a method answers, as parts of one body, and what to do once that
// is sent.
type answer struct {
	body  [][]byte
	after func()
}

func oneBody(b []byte) answer { return answer{body: [][]byte{b}} }
