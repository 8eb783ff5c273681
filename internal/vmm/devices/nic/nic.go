// Package nic is a virtio-net device whose frames go through a descriptor to the process
// that is the sandbox's network.
//
// The descriptor is a non-blocking unix socket that keeps messages apart (SOCK_SEQPACKET or SOCK_DGRAM); each message is one
// Ethernet frame without checksum, as on a wire. The device offers no offloads, so a frame is never longer
// than the MTU and its header.
//
// To the guest, a frame is read only when the guest has given a buffer: what does not fit
// waits in the socket and stops the sender. From the guest, a frame that the socket does not take waits in the
// queue. Frames that are too long or too short, in either direction, and frames to nobody are dropped and counted.
//
// Goroutines and locks are as in package console.
package nic

import (
	"encoding/binary"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/devices/devstate"
	"forkd.dev/forkd/internal/vmm/devices/hostfd"
	"forkd.dev/forkd/internal/vmm/virtio"
)

const (
	queueSize = 256
	toGuest   = 0
	fromGuest = 1

	headerLen = 12 // struct virtio_net_hdr_v1
	minFrame  = 14
	// frameExtra is an Ethernet header with a VLAN tag.
	frameExtra = 18
	minMTU     = 1280
	maxMTU     = 9000
)

// Feature bits (5.1.3).
const (
	featureMTU    = 1 << 3
	featureMAC    = 1 << 5
	featureStatus = 1 << 16
)

// Config is what a Device needs. MAC and Clock are required.
type Config struct {
	MAC   [6]byte
	MTU   uint16 // 1280 to 9000; 0 means 1500
	Clock devices.Clock
	// Bytes and Frames limit what the guest may send.
	Bytes, Frames devices.Rate
}

// Device is the network card. Its methods beside those of virtio.Device are for the host.
type Device struct {
	bus   virtio.Bus
	cfg   Config
	chain virtio.Chain
	frame []byte // header and one frame, and a byte to see that there was more

	bytes, frames devices.Bucket
	timer         devices.Timer
	kick          func()

	pumps sync.WaitGroup
	mu    sync.Mutex
	// Guarded by mu.
	link   *link
	closed bool

	received, sent, dropped atomic.Uint64
}

// link is a connected descriptor.
type link struct {
	*hostfd.FD
	d *Device

	// Of the receiving goroutine.
	fill  func() error
	fd    int
	found hostfd.Verdict
}

// New returns a card without a connection.
func New(cfg Config) (*Device, error) {
	if cfg.MTU == 0 {
		cfg.MTU = 1500
	}
	if cfg.Clock == nil || cfg.MTU < minMTU || cfg.MTU > maxMTU || cfg.MAC[0]&1 != 0 || cfg.MAC == [6]byte{} {
		return nil, errdefs.New(errdefs.ErrInvalid, "network card: a clock, a unicast address and an MTU of %d to %d are required", minMTU, maxMTU)
	}
	now := cfg.Clock.Now()
	d := &Device{cfg: cfg, frame: make([]byte, headerLen+int(cfg.MTU)+frameExtra+1),
		bytes: devices.NewBucket(cfg.Bytes, now), frames: devices.NewBucket(cfg.Frames, now)}
	d.kick = func() { d.bus.Kick(fromGuest) }
	return d, nil
}

// Connect makes f, which belongs to the device from now on, the other end of the cable, in
// place of what was.
func (d *Device) Connect(f *os.File) error {
	l := &link{d: d}
	l.fill = l.fillLocked
	fd, err := hostfd.New(f, hostfd.Config{Readable: l.readable, Writable: d.kick, Ended: l.end, Goroutines: &d.pumps})
	if err != nil {
		f.Close()
		return err
	}
	l.FD = fd
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		f.Close()
		return errdefs.New(errdefs.ErrUnavailable, "network card: it is closed")
	}
	old := d.link
	d.link = l
	l.Start()
	d.mu.Unlock()
	if old != nil {
		old.Close()
	}
	d.bus.Kick(fromGuest)
	d.bus.Kick(toGuest)
	return nil
}

// Close ends the connection and waits for its goroutines. It may be repeated.
func (d *Device) Close() {
	d.mu.Lock()
	l := d.link
	d.link, d.closed = nil, true
	d.mu.Unlock()
	if l != nil {
		l.Close()
	}
	d.pumps.Wait()
}

// Counters returns frames since the device was made: to the guest, from the guest, and dropped.
func (d *Device) Counters() (received, sent, dropped uint64) {
	return d.received.Load(), d.sent.Load(), d.dropped.Load()
}

func (d *Device) connected() *link {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.link
}

func (d *Device) forget(l *link) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.link == l {
		d.link = nil
	}
}

// Attach implements what a Transport calls once.
func (d *Device) Attach(b virtio.Bus) { d.bus = b }

// Type implements virtio.Device, as do the methods below.
func (d *Device) Type() uint32 { return virtio.TypeNet }

// Features implements virtio.Device.
func (d *Device) Features() uint64 { return featureMTU | featureMAC | featureStatus }

// QueueSizes implements virtio.Device.
func (d *Device) QueueSizes() []uint16 { return []uint16{queueSize, queueSize} }

// ReadConfig implements virtio.Device. The link is always up: a cable that nobody holds loses frames.
func (d *Device) ReadConfig(p []byte, off uint32) {
	var c [12]byte
	copy(c[:], d.cfg.MAC[:])
	binary.LittleEndian.PutUint16(c[6:], 1)
	binary.LittleEndian.PutUint16(c[8:], 1)
	binary.LittleEndian.PutUint16(c[10:], d.cfg.MTU)
	if off < uint32(len(c)) {
		copy(p, c[off:])
	}
}

// WriteConfig implements virtio.Device.
func (d *Device) WriteConfig([]byte, uint32) {}

// Start implements virtio.Device.
func (d *Device) Start() {}

// Reset implements virtio.Device. The connection stays.
func (d *Device) Reset() { d.stopTimer() }

func (d *Device) stopTimer() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

// Process implements virtio.Device.
func (d *Device) Process(i int) error {
	if i == fromGuest {
		return d.transmit()
	}
	if l := d.connected(); l != nil {
		l.WantInput()
	}
	return nil
}

// transmit sends what the guest has queued. The Transport's lock is held.
func (d *Device) transmit() error {
	q := d.bus.Queue(fromGuest)
	for {
		ok, err := q.Pop(&d.chain)
		if err != nil || !ok {
			return err
		}
		if d.chain.ReadLen < headerLen {
			return errdefs.New(errdefs.ErrGuest, "frame of %d bytes, less than its header", d.chain.ReadLen)
		}
		if wait := d.limit(); wait > 0 {
			q.Return()
			d.stopTimer()
			d.timer = d.cfg.Clock.AfterFunc(wait, d.kick)
			return nil
		}
		if !d.send() {
			q.Return()
			return nil
		}
		q.Push(d.chain.Head, 0)
	}
}

func (d *Device) limit() time.Duration {
	if !d.bytes.Limited() && !d.frames.Limited() {
		return 0
	}
	now := d.cfg.Clock.Now()
	return max(d.bytes.Wait(now), d.frames.Wait(now))
}

// send sends the frame of the chain or drops it; it returns false if the frame has to wait.
func (d *Device) send() bool {
	l := d.connected()
	n := devices.Gather(d.frame, d.chain.Readable)
	frame := d.frame[headerLen:max(n, headerLen)]
	plain := d.frame[0]|d.frame[1] == 0 // no checksum to fill in, no segments to make
	if l == nil || !plain || len(frame) < minFrame || n == len(d.frame) {
		d.dropped.Add(1)
		return true
	}
	_, err := l.Write(frame)
	switch {
	case err == nil:
		d.bytes.Use(uint64(len(frame)))
		d.frames.Use(1)
		d.sent.Add(1)
		return true
	case errors.Is(err, unix.EAGAIN):
		l.WantOutput()
		return false
	case errors.Is(err, unix.EMSGSIZE), errors.Is(err, unix.ENOBUFS):
		d.dropped.Add(1)
		return true
	}
	d.dropped.Add(1)
	d.forget(l)
	l.Fail()
	return true
}

// readable moves frames to the guest as far as it has given buffers.
func (l *link) readable(fd int) hostfd.Verdict {
	l.found, l.fd = hostfd.Parked, fd
	if !l.d.bus.Exclusive(l.fill) {
		return hostfd.Parked // Resume processes the queue, which wishes again
	}
	return l.found
}

func (l *link) end() {
	l.d.forget(l)
	l.Close()
}

// fillLocked reads frames into the buffers that the guest gave. The Transport's lock is held.
func (l *link) fillLocked() error {
	d := l.d
	q := d.bus.Queue(toGuest)
	if d.connected() != l {
		return nil
	}
	for range queueSize { // then the lock is free for others
		ok, err := q.Pop(&d.chain)
		if err != nil || !ok {
			return err
		}
		n, err := hostfd.Read(l.fd, d.frame[headerLen:])
		if n <= 0 {
			q.Return()
			l.found = hostfd.Ended
			if errors.Is(err, unix.EAGAIN) {
				l.found = hostfd.Empty
			}
			return nil
		}
		total := headerLen + n
		if n < minFrame || total == len(d.frame) || uint64(total) > d.chain.WriteLen {
			q.Return()
			d.dropped.Add(1)
			continue
		}
		clear(d.frame[:headerLen])
		d.frame[10] = 1 // buffers that the frame takes
		q.Push(d.chain.Head, uint32(devices.Scatter(d.chain.Writable, d.frame[:total])))
		d.received.Add(1)
	}
	l.WantInput()
	return nil
}

const stateVersion = 1

// AppendState implements virtio.Device: the address, which the guest has learned, and the
// MTU, to be compared.
func (d *Device) AppendState(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, stateVersion)
	b = append(b, d.cfg.MAC[:]...)
	return binary.LittleEndian.AppendUint16(b, d.cfg.MTU)
}

// LoadState implements virtio.Device. The card has the address of the machine that the
// state is of from now on: its guest goes on using it.
func (d *Device) LoadState(b []byte) error {
	dec := devstate.NewDecoder(b, "network card", stateVersion)
	var mac [6]byte
	for i := range mac {
		mac[i] = dec.Uint8()
	}
	mtu := dec.Uint16()
	if err := dec.Close(); err != nil {
		return err
	}
	if mtu != d.cfg.MTU {
		return errdefs.New(errdefs.ErrIncompatible, "state is of a network card with an MTU of %d, this one has %d", mtu, d.cfg.MTU)
	}
	d.cfg.MAC = mac
	return nil
}
