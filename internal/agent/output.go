package agent

import (
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
		if b.top > bigOutput { // a growing slice, and its copy in the reply
			debug.SetMemoryLimit(int64(baseHeap + 4*b.top))
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

// sink keeps the first limit bytes of an output and drops the rest.
type sink struct {
	budget *budget

	mu sync.Mutex
	// +checklocks:mu
	limit int
	// +checklocks:mu
	buf []byte
	// +checklocks:mu
	reserved int
	// +checklocks:mu
	truncated bool
}

func (s *sink) add(p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := min(len(p), max(s.limit-len(s.buf), 0))
	if need := len(s.buf) + n - s.reserved; need > 0 {
		step := min(max(need, 64<<10, s.reserved/2), s.limit-s.reserved)
		if s.budget.take(step) {
			s.reserved += step
		} else {
			n = s.reserved - len(s.buf)
		}
	}
	if n < len(p) {
		s.truncated = true
	}
	s.buf = append(s.buf, p[:n]...)
}

// take returns the output so far and empties the sink; the caller gives the
// reserved bytes back once it no longer holds them.
func (s *sink) take() (out []byte, truncated bool, reserved int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out, truncated, reserved = s.buf, s.truncated, s.reserved
	s.buf, s.truncated, s.reserved = nil, false, 0
	return out, truncated, reserved
}

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
