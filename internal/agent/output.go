package agent

import (
	"bytes"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// baseHeap is the heap the agent may have beside the output it holds.
const baseHeap = 32 << 20

// budget bounds the output that all calls hold together, to a quarter of the
// machine's memory, so that no caller can starve the guest by asking for much.
type budget struct {
	mu sync.Mutex
	// +checklocks:mu
	limit, held, top int
}

func (b *budget) init() {
	b.limit = 64 << 20
	text, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "MemTotal:" {
			if kib, err := strconv.Atoi(f[1]); err == nil {
				b.limit = max(kib/4<<10, 16<<20)
			}
			break
		}
	}
}

const bigOutput = 4 << 20

// take reserves n bytes, or tells that there are none.
func (b *budget) take(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held+n > b.limit {
		return false
	}
	b.held += n
	if b.held > b.top {
		b.top = b.held
		if b.top > bigOutput {
			debug.SetMemoryLimit(int64(baseHeap + b.top))
		}
	}
	return true
}

// give returns n bytes. After large outputs the heap goes back to the system.
func (b *budget) give(n int) {
	b.mu.Lock()
	b.held -= n
	shrink := b.held == 0 && b.top > bigOutput
	if shrink {
		b.top = 0
		debug.SetMemoryLimit(baseHeap)
	}
	b.mu.Unlock()
	if shrink {
		debug.FreeOSMemory()
	}
}

// pieceSize is how much of an output lies in one piece of memory.
const pieceSize = 64 << 10

// sink keeps the first limit bytes of an output and drops the rest. It keeps them
// in pieces, which never move and go into the reply as they are.
type sink struct {
	budget *budget

	mu sync.Mutex
	// +checklocks:mu
	limit int
	// +checklocks:mu
	pieces [][]byte
	// +checklocks:mu
	size int // in pieces
	// +checklocks:mu
	reserved int
	// +checklocks:mu
	truncated bool
}

func (s *sink) add(p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := max(s.limit-s.size, 0); n < len(p) {
		s.truncated = true
		p = p[:n]
	}
	for len(p) > 0 {
		room := s.roomLocked()
		if room == nil {
			s.truncated = true
			return
		}
		n := min(len(p), cap(*room)-len(*room))
		*room = append(*room, p[:n]...)
		s.size += n
		p = p[n:]
	}
}

// roomLocked returns the last piece if it has room, or a new one; nil if the
// budget is used up. The first piece is small: most outputs are.
func (s *sink) roomLocked() *[]byte {
	if n := len(s.pieces); n > 0 && len(s.pieces[n-1]) < cap(s.pieces[n-1]) {
		return &s.pieces[n-1]
	}
	size := min(pieceSize, 1<<10<<(2*min(len(s.pieces), 3)))
	if !s.budget.take(size) {
		return nil
	}
	s.reserved += size
	s.pieces = append(s.pieces, make([]byte, 0, size))
	return &s.pieces[len(s.pieces)-1]
}

// output is what a sink held.
type output struct {
	pieces    [][]byte
	truncated bool
	reserved  int
}

// take returns the output so far and empties the sink; the caller gives the
// reserved bytes back once it no longer holds the pieces.
func (s *sink) take() output {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := output{pieces: s.pieces, truncated: s.truncated, reserved: s.reserved}
	s.pieces, s.size, s.truncated, s.reserved = nil, 0, false, 0
	return out
}

// text returns the output in one piece.
func (o output) text() []byte { return bytes.Join(o.pieces, nil) }

func (s *sink) setLimit(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limit = n
}

// pump moves what a program writes into a sink, for as long as somebody can write.
type pump struct {
	f     *os.File
	raw   syscall.RawConn
	sink  *sink
	asked chan chan struct{}
	done  chan struct{}
	size  int // of the pipe
}

// newPump takes over the read end of a pipe.
func newPump(f *os.File, s *sink) (*pump, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	p := &pump{f: f, raw: raw, sink: s, asked: make(chan chan struct{}, 1), done: make(chan struct{}), size: 64 << 10}
	raw.Control(func(fd uintptr) {
		if n, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0); err == nil {
			p.size = n
		}
	})
	go func() {
		defer close(p.done)
		p.run()
	}()
	return p, nil
}

func (p *pump) run() {
	buf := make([]byte, 16<<10)
	for {
		over := false
		err := p.raw.Read(func(fd uintptr) bool {
			n, err := unix.Read(int(fd), buf)
			switch {
			case err == unix.EAGAIN:
				return false
			case err == unix.EINTR:
			case n <= 0:
				over = true
			default:
				p.sink.add(buf[:n])
			}
			return true
		})
		switch {
		case over:
			return
		case err == nil:
			continue
		}
		select { // the deadline: somebody asked for a flush, or the file was closed
		case ask := <-p.asked:
			p.f.SetReadDeadline(time.Time{})
			p.drain(buf)
			close(ask)
		default:
			return
		}
	}
}

// drain takes what is in the pipe now and no more: at most its size, because a
// process left in the background may go on writing for ever.
func (p *pump) drain(buf []byte) {
	p.raw.Control(func(fd uintptr) {
		for left := p.size; left > 0; {
			n, err := unix.Read(int(fd), buf[:min(left, len(buf))])
			if err == unix.EINTR {
				continue
			}
			if n <= 0 || err != nil {
				return
			}
			p.sink.add(buf[:n])
			left -= n
		}
	})
}

// flush returns once everything written before the call is in the sink.
func (p *pump) flush() {
	ask := make(chan struct{})
	select {
	case p.asked <- ask:
	case <-p.done:
		return
	}
	p.f.SetReadDeadline(time.Unix(1, 0))
	select {
	case <-ask:
	case <-p.done:
	}
}

// close ends the pump; writers get EPIPE from then on.
func (p *pump) close() {
	p.f.Close()
	<-p.done
}
