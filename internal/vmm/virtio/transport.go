package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"forkd.dev/forkd/internal/errdefs"
)

// Config is what a [Transport] needs. Name, Memory and Interrupt are required.
type Config struct {
	Name      string // in reasons of failures, e.g. "disk"
	Memory    GuestMemory
	Interrupt Interrupter
	// Doorbell, if set, is the eventfd that the hypervisor writes when the guest writes
	// QueueNotify of any queue (one ioeventfd per device, no datamatch); the machine
	// runs Serve with it. Without it the guest's write is an MMIO exit and the queue is
	// processed on that vCPU's thread.
	Doorbell *os.File
	// OnFailure, if set, is told once per reset what the guest did wrong. It is called with the
	// device's lock held: it must not block or use the Transport. A guest can make
	// it be called at will.
	OnFailure func(error)
}

// Transport is a virtio device on its MMIO window. All methods may be called concurrently.
type Transport struct {
	cfg Config
	dev Device

	isr        atomic.Uint32 // pending causes, as the guest reads them
	generation atomic.Uint32 // of the configuration space
	pausing    atomic.Bool   // Pause was called; who works lets go

	mu sync.Mutex
	// All below is guarded by mu.
	paused         bool
	status         uint32
	failure        error
	deviceSel      uint32 // which 32 feature bits are read
	driverSel      uint32 // and written
	queueSel       uint32
	driverFeatures uint64
	queues         []*Queue
}

// Causes of an interrupt (4.2.2).
const (
	causeQueue  = 1
	causeConfig = 2
)

// queueResetter is implemented by devices that hold state of a single queue.
type queueResetter interface {
	// ResetQueue is called when the driver takes queue i out of use.
	ResetQueue(i int)
}

// attacher is implemented by devices that act on their own, not only when asked.
type attacher interface{ Attach(bus Bus) }

// NewTransport puts dev on a window of registers. It is paused.
func NewTransport(cfg Config, dev Device) (*Transport, error) {
	if cfg.Memory == nil || cfg.Interrupt == nil || dev == nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "virtio device %q: memory, interrupt and device are required", cfg.Name)
	}
	t := &Transport{cfg: cfg, dev: dev, paused: true}
	for i, n := range dev.QueueSizes() {
		if n == 0 || n > MaxQueueSize || n&(n-1) != 0 {
			return nil, errdefs.New(errdefs.ErrInvalid, "virtio device %q: queue %d has length %d", cfg.Name, i, n)
		}
		t.queues = append(t.queues, &Queue{mem: cfg.Memory, limit: n, size: n})
	}
	if n := len(t.queues); n == 0 || n > maxQueues {
		return nil, errdefs.New(errdefs.ErrInvalid, "virtio device %q: %d queues", cfg.Name, n)
	}
	if a, ok := dev.(attacher); ok {
		a.Attach(bus{t})
	}
	return t, nil
}

// maxQueues fits a mask of 64 bits.
const maxQueues = 64

// Name returns the name of the Config.
func (t *Transport) Name() string { return t.cfg.Name }

// Failure returns what the guest did wrong, or nil. It is of class errdefs.ErrGuest.
func (t *Transport) Failure() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failure
}

// Pause returns once the device stands still and keeps it so. It waits for the request
// that is being worked on. It may be repeated.
func (t *Transport) Pause() {
	t.pausing.Store(true)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.paused = true
}

// Resume lets the device work, beginning with what it finds in its queues, and raises
// its interrupt again if the guest has not acknowledged it. It may be repeated.
func (t *Transport) Resume() {
	t.mu.Lock()
	t.paused = false
	t.pausing.Store(false)
	active := t.activeLocked()
	t.mu.Unlock()
	if t.isr.Load() != 0 {
		t.cfg.Interrupt.Raise()
	}
	if !active {
		return
	}
	if t.cfg.Doorbell != nil {
		if _, err := t.cfg.Doorbell.Write(ring); err == nil {
			return
		}
	}
	t.KickAll()
}

// ring is what adds one to an eventfd.
var ring = binary.NativeEndian.AppendUint64(nil, 1)

// Serve processes the queues whenever the doorbell of the Config rings, until reading
// it fails, which closing it does. Exactly one goroutine runs it.
func (t *Transport) Serve() error {
	if t.cfg.Doorbell == nil {
		return errdefs.New(errdefs.ErrInvalid, "virtio device %q has no doorbell", t.cfg.Name)
	}
	var count [8]byte
	for {
		if _, err := io.ReadFull(t.cfg.Doorbell, count[:]); err != nil {
			if errors.Is(err, os.ErrClosed) {
				return nil
			}
			return fmt.Errorf("read doorbell of %s: %w", t.cfg.Name, err)
		}
		t.KickAll()
	}
}

// Kick processes queue i on the caller's goroutine until nothing is left to do. It does
// nothing while the device is paused, not started or failed.
func (t *Transport) Kick(i int) {
	if i >= 0 && i < len(t.queues) {
		t.work(1 << i)
	}
}

// KickAll is Kick of all queues.
func (t *Transport) KickAll() { t.work(1<<len(t.queues) - 1) }

// work gives the queues of the mask their turns until none wants another one. Between
// turns the lock is free.
func (t *Transport) work(mask uint64) {
	for mask != 0 && !t.pausing.Load() {
		mask = t.turn(mask)
	}
}

// turn returns the queues that want another turn.
func (t *Transport) turn(mask uint64) (again uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.beginTurnLocked()
	for i, q := range t.queues {
		if mask&(1<<i) == 0 || !q.ready || !t.activeLocked() {
			continue
		}
		if err := t.dev.Process(i); err != nil {
			t.failLocked(err)
		}
	}
	return t.endTurnLocked()
}

func (t *Transport) beginTurnLocked() {
	for _, q := range t.queues {
		q.turn, q.more = q.size, false
	}
}

func (t *Transport) endTurnLocked() (again uint64) {
	t.interruptLocked()
	for i, q := range t.queues {
		if q.more {
			again |= 1 << i
		}
	}
	return again
}

// interruptLocked raises the interrupt if the driver wants it for any queue.
func (t *Transport) interruptLocked() {
	want := false
	for _, q := range t.queues {
		if q.wantsInterrupt() {
			want = true
		}
	}
	if want {
		t.isr.Or(causeQueue)
		t.cfg.Interrupt.Raise()
	}
}

// activeLocked tells whether the device may use its queues.
func (t *Transport) activeLocked() bool {
	return !t.paused && t.status&(statusDriverOK|statusNeedsReset|statusFailed) == statusDriverOK
}

// failLocked ends the device until the guest resets it.
func (t *Transport) failLocked(err error) {
	if t.status&statusNeedsReset != 0 {
		return
	}
	t.failure = fmt.Errorf("device %s: %w", t.cfg.Name, errdefs.As(errdefs.ErrGuest, err))
	t.status |= statusNeedsReset
	if t.status&statusDriverOK != 0 {
		t.configChangedLocked()
	}
	if t.cfg.OnFailure != nil {
		t.cfg.OnFailure(t.failure)
	}
}

func (t *Transport) configChangedLocked() {
	t.generation.Add(1)
	t.isr.Or(causeConfig)
	t.cfg.Interrupt.Raise()
}

// bus is what the device sees of its Transport.
type bus struct{ t *Transport }

func (b bus) Queue(i int) *Queue { return b.t.queues[i] }
func (b bus) Negotiated() uint64 { return b.t.driverFeatures }
func (b bus) Kick(i int)         { b.t.Kick(i) }
func (b bus) Interrupt()         { b.t.interruptLocked() }

func (b bus) ConfigChanged() {
	if b.t.status&statusDriverOK != 0 {
		b.t.configChangedLocked()
	}
}

func (b bus) Exclusive(f func() error) bool {
	t := b.t
	if t.pausing.Load() {
		return false
	}
	again, done := t.exclusive(f)
	t.work(again)
	return done
}

func (t *Transport) exclusive(f func() error) (again uint64, done bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.activeLocked() {
		return 0, false
	}
	t.beginTurnLocked()
	if err := f(); err != nil {
		t.failLocked(err)
	}
	return t.endTurnLocked(), true
}
