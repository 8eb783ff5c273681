// Package block is a virtio-blk device over a disk of copy-on-write layers (cow1).
//
// Requests are done one after the other, on the goroutine that processes the queue,
// straight between guest memory and the files of the layers. So nothing is in flight
// while the device is paused, and a capture needs nothing but [Device.Freeze]: the overlay becomes a
// sealed layer and an empty one takes its place.
//
// The guest's flush is the disk's Flush: what was written before it survives as the overlay's
// Durability says. A request that the host cannot do (no space, damage) fails alone with an I/O
// error; one that is no request at all breaks the device until the guest resets it.
package block

import (
	"encoding/binary"
	"sync/atomic"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt/cow1"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/devices/devstate"
	"forkd.dev/forkd/internal/vmm/virtio"
)

// SectorSize is the unit of addresses in requests.
const SectorSize = 512

// Limits of a request.
const (
	queueSize = 256
	// segMax leaves place for header and status in a queue.
	segMax = queueSize - 2
	// maxTransfer bounds how long one request can keep the device busy.
	maxTransfer = 16 << 20
	// maxRange bounds a discard or write-zeroes segment (256 MiB), maxSegments their number.
	maxRange    = 512 << 10
	maxSegments = 1
	idLen       = 20
)

// Feature bits (5.2.3).
const (
	featureSegMax      = 1 << 2
	featureBlkSize     = 1 << 6
	featureFlush       = 1 << 9
	featureTopology    = 1 << 10
	featureDiscard     = 1 << 13
	featureWriteZeroes = 1 << 14
)

// Config is what a Device needs. Disk and Clock are required.
type Config struct {
	Disk *cow1.Disk
	// ID is what the guest reads as the serial number, at most 20 bytes.
	ID    string
	Clock devices.Clock
	// Bytes and Requests limit how much the guest may read and write.
	Bytes, Requests devices.Rate
	// OnError, if set, is told why the host could not do a request, at most once a second. It
	// is called with the device's lock held.
	OnError func(error)
}

// Device is the disk. Its methods beside those of virtio.Device are for the host.
type Device struct {
	bus   virtio.Bus
	cfg   Config
	disk  *cow1.Disk
	chain virtio.Chain

	bytes, requests devices.Bucket
	errors          devices.Bucket // how often OnError is called
	timer           devices.Timer  // set while the queue waits for a limit
	kick            func()

	reads, writes, readBytes, writtenBytes, flushes, failed atomic.Uint64
}

// Counters are what the device did since it was made.
type Counters struct {
	Reads, Writes, Flushes  uint64 // requests; discards count as writes
	ReadBytes, WrittenBytes uint64
	Failed                  uint64 // requests that ended with an error
}

// New returns a disk.
func New(cfg Config) (*Device, error) {
	if cfg.Disk == nil || cfg.Clock == nil || len(cfg.ID) > idLen {
		return nil, errdefs.New(errdefs.ErrInvalid, "block device: a disk, a clock and an id of at most %d bytes are required", idLen)
	}
	now := cfg.Clock.Now()
	d := &Device{cfg: cfg, disk: cfg.Disk,
		bytes: devices.NewBucket(cfg.Bytes, now), requests: devices.NewBucket(cfg.Requests, now),
		errors: devices.NewBucket(devices.Rate{PerSecond: 1}, now)}
	d.kick = func() { d.bus.Kick(0) }
	return d, nil
}

// Freeze seals the overlay of the disk, as the layer of a capture, and goes on with next. The
// device is paused. After an error the disk is as before.
func (d *Device) Freeze(next *cow1.Overlay) error { return d.disk.Freeze(next) }

// Replace puts another disk of the same length in place, as a rollback does. The device is
// paused; its state is loaded next, or the guest has not used it yet.
func (d *Device) Replace(disk *cow1.Disk) error {
	if disk.Bytes() != d.disk.Bytes() {
		return errdefs.New(errdefs.ErrInvalid, "replace disk: %d bytes instead of %d", disk.Bytes(), d.disk.Bytes())
	}
	d.disk = disk
	return nil
}

// Disk returns the disk; it may be used while the device is paused.
func (d *Device) Disk() *cow1.Disk { return d.disk }

// Counters may be called at any time.
func (d *Device) Counters() Counters {
	return Counters{Reads: d.reads.Load(), Writes: d.writes.Load(), Flushes: d.flushes.Load(),
		ReadBytes: d.readBytes.Load(), WrittenBytes: d.writtenBytes.Load(), Failed: d.failed.Load()}
}

// Attach implements what a Transport calls once.
func (d *Device) Attach(b virtio.Bus) { d.bus = b }

// Type implements virtio.Device, as do the methods below.
func (d *Device) Type() uint32 { return virtio.TypeBlock }

// Features implements virtio.Device.
func (d *Device) Features() uint64 {
	return featureSegMax | featureBlkSize | featureFlush | featureTopology | featureDiscard | featureWriteZeroes
}

// QueueSizes implements virtio.Device.
func (d *Device) QueueSizes() []uint16 { return []uint16{queueSize} }

// ReadConfig implements virtio.Device.
func (d *Device) ReadConfig(p []byte, off uint32) {
	var c [60]byte // struct virtio_blk_config up to write_zeroes_may_unmap
	le := binary.LittleEndian
	le.PutUint64(c[0:], uint64(d.disk.Bytes()/SectorSize))
	le.PutUint32(c[12:], segMax)
	le.PutUint32(c[20:], SectorSize)
	c[24] = 3 // a physical block is 2^3 sectors: smaller writes are slower
	le.PutUint16(c[26:], cow1.BlockSize/SectorSize)
	le.PutUint16(c[34:], 1) // queues
	le.PutUint32(c[36:], maxRange)
	le.PutUint32(c[40:], maxSegments)
	le.PutUint32(c[44:], cow1.BlockSize/SectorSize)
	le.PutUint32(c[48:], maxRange)
	le.PutUint32(c[52:], maxSegments)
	c[56] = 1 // write-zeroes may give space back
	if off < uint32(len(c)) {
		copy(p, c[off:])
	}
}

// WriteConfig implements virtio.Device: there is nothing to write.
func (d *Device) WriteConfig([]byte, uint32) {}

// Start implements virtio.Device.
func (d *Device) Start() {}

// Reset implements virtio.Device. What the disk holds stays.
func (d *Device) Reset() { d.stopTimer() }

func (d *Device) stopTimer() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

// Process implements virtio.Device.
func (d *Device) Process(i int) error {
	q := d.bus.Queue(i)
	moved := uint64(0)
	for {
		ok, err := q.Pop(&d.chain)
		if err != nil || !ok {
			return err
		}
		if wait := d.limit(); wait > 0 {
			q.Return()
			// A new timer for each try: one that fired during a pause has told nobody.
			d.stopTimer()
			d.timer = d.cfg.Clock.AfterFunc(wait, d.kick)
			return nil
		}
		length := d.chain.ReadLen + d.chain.WriteLen
		written, err := d.handle(&d.chain)
		if err != nil {
			return err
		}
		q.Push(d.chain.Head, written)
		// The driver need not wait for the end of a long queue to go on.
		if moved += length; moved >= 256<<10 {
			d.bus.Interrupt()
			moved = 0
		}
	}
}

// limit returns how long the request has to wait, and if not at all, counts it.
func (d *Device) limit() time.Duration {
	if !d.bytes.Limited() && !d.requests.Limited() {
		return 0
	}
	now := d.cfg.Clock.Now()
	if wait := max(d.bytes.Wait(now), d.requests.Wait(now)); wait > 0 {
		return wait
	}
	d.requests.Use(1)
	d.bytes.Use(min(d.chain.ReadLen+d.chain.WriteLen, maxTransfer))
	return 0
}

const stateVersion = 1

// AppendState implements virtio.Device: the length of the disk, to be compared. What is
// in it is in its layers.
func (d *Device) AppendState(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, stateVersion)
	return binary.LittleEndian.AppendUint64(b, uint64(d.disk.Bytes()))
}

// LoadState implements virtio.Device.
func (d *Device) LoadState(b []byte) error {
	dec := devstate.NewDecoder(b, "block device", stateVersion)
	n := dec.Uint64()
	if err := dec.Close(); err != nil {
		return err
	}
	if n != uint64(d.disk.Bytes()) {
		return errdefs.New(errdefs.ErrIncompatible, "state is of a disk of %d bytes, this one has %d", n, d.disk.Bytes())
	}
	return nil
}
