// Package virtiotest has a guest for tests of virtio devices: memory, an interrupt line, a clock, and a
// driver that does with a device what Linux's drivers do, through registers and rings only.
//
// All of it is for one goroutine at a time, except Line, Clock and the bytes of Memory.
package virtiotest

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"forkd.dev/forkd/internal/vmm/devices"
)

// Memory is guest memory with a hole: low bytes from 0 and high bytes from HighBase.
type Memory struct {
	Low, High []byte
}

// HighBase is where the second piece of a Memory begins.
const HighBase = 4 << 30

// NewMemory makes memory of two pieces.
func NewMemory(low, high int) *Memory {
	return &Memory{Low: make([]byte, low), High: make([]byte, high)}
}

var errOutside = errors.New("outside of guest memory")

// Slice implements virtio.GuestMemory.
func (m *Memory) Slice(addr, n uint64) ([]byte, error) {
	b, base := m.Low, uint64(0)
	if addr >= HighBase {
		b, base = m.High, HighBase
	}
	off, size := addr-base, uint64(len(b))
	if off > size || n > size-off {
		return nil, errOutside
	}
	return b[off : off+n : off+n], nil
}

// Clone returns memory with the same content, as a fork has it.
func (m *Memory) Clone() *Memory {
	return &Memory{Low: slices.Clone(m.Low), High: slices.Clone(m.High)}
}

// Equal tells whether both hold the same bytes.
func (m *Memory) Equal(o *Memory) bool {
	return bytes.Equal(m.Low, o.Low) && bytes.Equal(m.High, o.High)
}

// Line counts interrupts.
type Line struct{ n atomic.Int64 }

// Raise implements virtio.Interrupter.
func (l *Line) Raise() { l.n.Add(1) }

// Take returns how often the line was raised since the last call.
func (l *Line) Take() int { return int(l.n.Swap(0)) }

// Clock is a devices.Clock that goes on only by Advance.
type Clock struct {
	mu     sync.Mutex
	now    time.Duration
	timers []*timer
}

type timer struct {
	c  *Clock
	at time.Duration
	f  func()
}

// Now implements devices.Clock.
func (c *Clock) Now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc implements devices.Clock. f runs on the goroutine that calls Advance.
func (c *Clock) AfterFunc(d time.Duration, f func()) devices.Timer {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &timer{c: c, at: c.now + d, f: f}
	c.timers = append(c.timers, t)
	return t
}

// Stop implements devices.Timer.
func (t *timer) Stop() bool {
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	i := slices.Index(t.c.timers, t)
	if i >= 0 {
		t.c.timers = slices.Delete(t.c.timers, i, i+1)
	}
	return i >= 0
}

// Advance lets time pass and calls what became due.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	c.now += d
	var due []*timer
	c.timers = slices.DeleteFunc(c.timers, func(t *timer) bool {
		if t.at <= c.now {
			due = append(due, t)
		}
		return t.at <= c.now
	})
	c.mu.Unlock()
	for _, t := range due {
		t.f()
	}
}

// Pending counts timers that have not fired.
func (c *Clock) Pending() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.timers)
}
