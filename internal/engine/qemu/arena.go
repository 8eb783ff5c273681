package qemu

import (
	"sync"
	"time"

	"forkd.dev/forkd/internal/linux"
)

// Memory that the kernel has not given yet costs several times of what copying into it
// costs, so room for a capture is touched before the guest stops. Captures often follow
// one another: what the last one used is kept for a while.

// Bounds of what is kept.
const (
	keptArena     = 256 << 20
	keptArenaTime = 10 * time.Second
)

// arenas keeps the room of the last capture.
type arenas struct {
	mu sync.Mutex
	// +checklocks:mu
	kept []byte
	// +checklocks:mu
	timer *time.Timer // frees it
}

// take returns touched memory: what is kept, if that has at least least bytes, or
// else wanted bytes. That is more, so that captures of a machine that grows from one
// to the next do not each need new memory. It is given back or freed.
func (a *arenas) take(least, wanted int) ([]byte, error) {
	a.mu.Lock()
	b := a.kept
	fits := b != nil && len(b) >= least
	if fits {
		a.kept = nil
	}
	a.mu.Unlock()
	if fits {
		return b, nil
	}
	return linux.Touched(max(least, wanted))
}

// give takes memory back.
func (a *arenas) give(b []byte) {
	a.mu.Lock()
	if len(b) <= keptArena && len(b) > len(a.kept) {
		b, a.kept = a.kept, b
		if a.timer != nil {
			a.timer.Stop()
		}
		a.timer = time.AfterFunc(keptArenaTime, a.drop)
	}
	a.mu.Unlock()
	_ = linux.Free(b)
}

// drop frees what is kept.
func (a *arenas) drop() {
	a.mu.Lock()
	b := a.kept
	a.kept = nil
	if a.timer != nil {
		a.timer.Stop()
	}
	a.mu.Unlock()
	_ = linux.Free(b)
}

// keptKiB is how much is kept.
func (a *arenas) keptKiB() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return int64(len(a.kept)) / 1024
}
