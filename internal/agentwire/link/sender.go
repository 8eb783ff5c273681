package link

import (
	"context"
	"slices"
	"sync"

	"forkd.dev/forkd/internal/agentwire"
)

// maxPosted bounds small frames that wait for the transport.
const maxPosted = 4096

// item is a body or frame on its way out.
type item struct {
	t     agentwire.FrameType
	id    uint32
	coded bool // payload starts with flags and code
	code  byte
	rest  [][]byte // not yet sent
	begun bool
	done  chan error // nil for posted frames; gets one value otherwise
}

// sender writes posted frames first, then one chunk of each body in turn.
type sender struct {
	exited chan struct{}
	wake   chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	posted []*item
	// +checklocks:mu
	bodies []*item
	// +checklocks:mu
	err error
}

func (s *sender) start(write func([]byte) error, fail func(error)) {
	s.exited = make(chan struct{})
	s.wake = make(chan struct{}, 1)
	go func() {
		defer close(s.exited)
		if err := s.run(write); err != nil {
			fail(err)
		}
	}()
}

func (s *sender) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *sender) post(it *item) bool {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return true
	}
	if len(s.posted) >= maxPosted {
		s.mu.Unlock()
		return false
	}
	s.posted = append(s.posted, it)
	s.mu.Unlock()
	s.poke()
	return true
}

func (s *sender) send(ctx context.Context, it *item) (bool, error) {
	s.mu.Lock()
	if s.err != nil {
		defer s.mu.Unlock()
		return false, s.err
	}
	s.bodies = append(s.bodies, it)
	s.mu.Unlock()
	s.poke()
	select {
	case err := <-it.done:
		return true, err
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.bodies, it); i >= 0 {
		s.bodies = slices.Delete(s.bodies, i, i+1)
	}
	return it.begun, ctx.Err()
}

// stop ends the sender: everything queued fails with err.
func (s *sender) stop(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	bodies := s.bodies
	s.bodies, s.posted = nil, nil
	for _, it := range bodies {
		it.done <- err
	}
	s.mu.Unlock()
	s.poke()
}

// next encodes the next frame into buf. It does so under the lock: once a body's
// sender was told that the link has ended, its bytes are the caller's again.
func (s *sender) next(buf []byte) (*item, []byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, nil, s.err
	}
	if len(s.posted) > 0 {
		it := s.posted[0]
		s.posted = s.posted[1:]
		return it, agentwire.AppendFrame(buf, it.t, it.id, it.rest...), nil
	}
	if len(s.bodies) == 0 {
		return nil, nil, nil
	}
	it := s.bodies[0]
	it.begun = true
	chunk := it.take(agentwire.ChunkSize)
	if !it.coded {
		return it, agentwire.AppendFrame(buf, it.t, it.id, chunk...), nil
	}
	var flags byte
	if len(it.rest) > 0 {
		flags = agentwire.FlagMore
	}
	return it, agentwire.AppendFrame(buf, it.t, it.id, append([][]byte{{flags, it.code}}, chunk...)...), nil
}

// take removes the next n bytes, or all that is left.
func (it *item) take(n int) (chunk [][]byte) {
	for len(it.rest) > 0 {
		part := it.rest[0]
		if len(part) > n {
			it.rest[0] = part[n:]
			return append(chunk, part[:n])
		}
		chunk = append(chunk, part)
		n -= len(part)
		it.rest = it.rest[1:]
	}
	return chunk
}

// wrote moves a body to the end of the queue, or out of it.
func (s *sender) wrote(it *item) {
	if it.done == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.bodies, it)
	if i < 0 { // given up meanwhile
		return
	}
	s.bodies = slices.Delete(s.bodies, i, i+1)
	if len(it.rest) > 0 {
		s.bodies = append(s.bodies, it)
		return
	}
	it.done <- nil
}

func (s *sender) run(write func([]byte) error) error {
	var buf []byte
	for {
		it, frame, err := s.next(buf[:0])
		if err != nil {
			return nil
		}
		if it == nil {
			<-s.wake
			continue
		}
		buf = frame
		if err := write(frame); err != nil {
			return err
		}
		s.wrote(it)
	}
}
