// Package balloon is a virtio-balloon device: it gives memory that the guest does not use
// back to the host.
//
// Two ways lead there. The host asks for pages ([Device.SetTarget]), the guest's driver
// takes that many out of use and names them. And without being asked, the guest reports
// ranges that are free (free page reporting). Either way the range is dropped: it takes no host memory until
// the guest writes to it again, and what it holds until then is undefined.
package balloon

import (
	"encoding/binary"
	"sync/atomic"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices/devstate"
	"forkd.dev/forkd/internal/vmm/virtio"
)

// pageSize is the unit of the balloon, whatever the machine's is.
const pageSize = 4096

// Queues. Linux numbers only those whose feature was agreed on, so reporting is the third.
const (
	inflateQueue = iota
	deflateQueue
	reportQueue
	queueSize = 128
)

const (
	featureDeflateOnOOM = 1 << 2
	featureReporting    = 1 << 5
	// Page poisoning is not offered on purpose: with it a reported page would have to keep its content, and
	// without it Linux reports only if content does not matter.
)

// maxPages is how many page numbers Linux puts into a request; more are an error, so that
// one request cannot keep the device busy.
const maxPages = 256

// maxReported bounds the ranges of one report. Linux sends 32.
const maxReported = 128

// Dropper gives guest memory back to the host.
type Dropper interface {
	// Drop gives back the n bytes at guest-physical address addr, both multiples of 4096 and
	// checked to be inside of guest memory. Their content is undefined afterwards. It may do
	// less than asked.
	Drop(addr, n uint64) error
}

// Config is what a Device needs. All of it is required.
type Config struct {
	Memory  virtio.GuestMemory
	Dropper Dropper
}

// Device is the balloon. Its methods beside those of virtio.Device are for the host.
type Device struct {
	bus   virtio.Bus
	cfg   Config
	chain virtio.Chain
	set   func() error

	target  atomic.Uint32 // pages the host wants
	actual  atomic.Uint32 // pages the guest says it has given, a claim
	dropped atomic.Uint64
}

// New returns an empty balloon.
func New(cfg Config) (*Device, error) {
	if cfg.Memory == nil || cfg.Dropper == nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "balloon: memory and a dropper are required")
	}
	d := &Device{cfg: cfg}
	d.set = func() error { d.bus.ConfigChanged(); return nil }
	return d, nil
}

// SetTarget asks the guest to give pages of 4096 bytes, 0 for none. It does what it likes. A paused guest learns of
// it when the target is set again.
func (d *Device) SetTarget(pages uint32) {
	d.target.Store(pages)
	d.bus.Exclusive(d.set)
}

// Counters returns the pages the guest says it has given, and the bytes that were dropped
// since the device was made.
func (d *Device) Counters() (pages uint32, dropped uint64) {
	return d.actual.Load(), d.dropped.Load()
}

// Attach implements what a Transport calls once.
func (d *Device) Attach(b virtio.Bus) { d.bus = b }

// Type implements virtio.Device, as do the methods below.
func (d *Device) Type() uint32 { return virtio.TypeBalloon }

// Features implements virtio.Device.
func (d *Device) Features() uint64 { return featureDeflateOnOOM | featureReporting }

// QueueSizes implements virtio.Device.
func (d *Device) QueueSizes() []uint16 { return []uint16{queueSize, queueSize, queueSize} }

// ReadConfig implements virtio.Device.
func (d *Device) ReadConfig(p []byte, off uint32) {
	var c [8]byte
	binary.LittleEndian.PutUint32(c[:], d.target.Load())
	binary.LittleEndian.PutUint32(c[4:], d.actual.Load())
	if off < uint32(len(c)) {
		copy(p, c[off:])
	}
}

// WriteConfig implements virtio.Device: the driver tells how many pages it gave.
func (d *Device) WriteConfig(p []byte, off uint32) {
	if off == 4 && len(p) == 4 {
		d.actual.Store(binary.LittleEndian.Uint32(p))
	}
}

// Start implements virtio.Device.
func (d *Device) Start() {}

// Reset implements virtio.Device.
func (d *Device) Reset() { d.actual.Store(0) }

// Process implements virtio.Device.
func (d *Device) Process(i int) error {
	q := d.bus.Queue(i)
	for {
		ok, err := q.Pop(&d.chain)
		if err != nil || !ok {
			return err
		}
		switch i {
		case inflateQueue:
			err = d.inflate()
		case reportQueue:
			err = d.reported()
		}
		if err != nil {
			return err
		}
		q.Push(d.chain.Head, 0)
	}
}

// inflate drops the pages whose numbers are in the request, neighbours together.
func (d *Device) inflate() error {
	if d.chain.ReadLen > 4*maxPages || d.chain.ReadLen%4 != 0 {
		return errdefs.New(errdefs.ErrGuest, "balloon request of %d bytes", d.chain.ReadLen)
	}
	var list [4 * maxPages]byte
	b := list[:0]
	for _, r := range d.chain.Readable {
		b = append(b, r...)
	}
	start, n := uint64(0), uint64(0)
	for ; len(b) > 0; b = b[4:] {
		page := uint64(binary.LittleEndian.Uint32(b)) * pageSize
		switch {
		case n > 0 && page == start+n:
			n += pageSize
		case n > 0 && page+pageSize == start: // Linux gives them downwards
			start, n = page, n+pageSize
		default:
			if err := d.drop(start, n); err != nil {
				return err
			}
			start, n = page, pageSize
		}
	}
	return d.drop(start, n)
}

func (d *Device) drop(addr, n uint64) error {
	if n == 0 {
		return nil
	}
	if _, err := d.cfg.Memory.Slice(addr, n); err != nil {
		return errdefs.New(errdefs.ErrGuest, "balloon page at %#x is not in guest memory", addr)
	}
	// What the host does not want back stays, which is no fault of the guest.
	if d.cfg.Dropper.Drop(addr, n) == nil {
		d.dropped.Add(n)
	}
	return nil
}

// reported drops the free ranges that are the writable buffers of the request. Addresses were
// checked when the chain was taken apart.
func (d *Device) reported() error {
	if len(d.chain.Writable) > maxReported {
		return errdefs.New(errdefs.ErrGuest, "report of %d free ranges", len(d.chain.Writable))
	}
	for i, b := range d.chain.Writable {
		addr, n := d.chain.WritableAt[i], uint64(len(b))
		end := (addr + n) / pageSize * pageSize
		addr = (addr + pageSize - 1) / pageSize * pageSize
		if addr >= end {
			continue
		}
		if err := d.drop(addr, end-addr); err != nil {
			return err
		}
	}
	return nil
}

const stateVersion = 1

// AppendState implements virtio.Device: the pages that the host wants and the guest gave.
func (d *Device) AppendState(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, stateVersion)
	b = binary.LittleEndian.AppendUint32(b, d.target.Load())
	return binary.LittleEndian.AppendUint32(b, d.actual.Load())
}

// LoadState implements virtio.Device.
func (d *Device) LoadState(b []byte) error {
	dec := devstate.NewDecoder(b, "balloon", stateVersion)
	target, actual := dec.Uint32(), dec.Uint32()
	if err := dec.Close(); err != nil {
		return err
	}
	d.target.Store(target)
	d.actual.Store(actual)
	return nil
}
