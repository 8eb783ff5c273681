package virtiotest

import (
	"encoding/binary"
	"fmt"
	"slices"

	"forkd.dev/forkd/internal/vmm/virtio"
)

var le = binary.LittleEndian

// Registers the driver uses (virtio 1.2, 4.2.2), stated again so that a wrong offset in
// the device is not wrong here too.
const (
	RegMagic          = 0x00
	RegVersion        = 0x04
	RegDeviceID       = 0x08
	RegDeviceFeatures = 0x10
	RegDeviceSel      = 0x14
	RegDriverFeatures = 0x20
	RegDriverSel      = 0x24
	RegQueueSel       = 0x30
	RegQueueNumMax    = 0x34
	RegQueueNum       = 0x38
	RegQueueReady     = 0x44
	RegQueueNotify    = 0x50
	RegInterrupt      = 0x60
	RegInterruptAck   = 0x64
	RegStatus         = 0x70
	RegQueueDesc      = 0x80
	RegQueueDriver    = 0x90
	RegQueueDevice    = 0xa0
	RegQueueReset     = 0xc0
	RegGeneration     = 0xfc
	RegConfig         = 0x100
)

// Status bits.
const (
	StatusAcknowledge = 1
	StatusDriver      = 2
	StatusDriverOK    = 4
	StatusFeaturesOK  = 8
	StatusNeedsReset  = 64
)

// Driver drives one device.
type Driver struct {
	T        *virtio.Transport
	Mem      *Memory
	Features uint64
	Queues   []*Queue
	// Notified counts doorbell writes; Mute keeps the driver from making any, as if
	// the hypervisor's ioeventfd took them.
	Notified int
	Mute     bool

	next uint64 // first free byte of the low memory
}

// NewDriver returns a driver that places its rings and buffers in mem.Low.
func NewDriver(t *virtio.Transport, mem *Memory) *Driver {
	return &Driver{T: t, Mem: mem, next: 4096}
}

// Clone returns the driver as it goes on in a fork.
func (d *Driver) Clone(t *virtio.Transport, mem *Memory) *Driver {
	c := *d
	c.T, c.Mem, c.Queues = t, mem, nil
	for _, q := range d.Queues {
		n := &Queue{Index: q.Index, Size: q.Size, DescAt: q.DescAt, AvailAt: q.AvailAt, UsedAt: q.UsedAt,
			NextAvail: q.NextAvail, LastUsed: q.LastUsed, Shown: q.Shown, kicked: q.kicked,
			d: &c, free: slices.Clone(q.free), chains: make(map[uint16][]uint16, len(q.chains))}
		for h, l := range q.chains {
			n.chains[h] = slices.Clone(l)
		}
		c.Queues = append(c.Queues, n)
	}
	return &c
}

// Reg reads a register.
func (d *Driver) Reg(off uint64) uint32 {
	var b [4]byte
	d.T.Read(off, b[:])
	return le.Uint32(b[:])
}

// SetReg writes a register.
func (d *Driver) SetReg(off uint64, v uint32) {
	var b [4]byte
	le.PutUint32(b[:], v)
	d.T.Write(off, b[:])
}

// Offered reads the device's features.
func (d *Driver) Offered() uint64 {
	d.SetReg(RegDeviceSel, 0)
	low := d.Reg(RegDeviceFeatures)
	d.SetReg(RegDeviceSel, 1)
	return uint64(d.Reg(RegDeviceFeatures))<<32 | uint64(low)
}

// Init does what a Linux driver does until the device works: reset, negotiate all offered features that
// are also in want, set up all queues with at most size entries, start.
func (d *Driver) Init(want uint64, size uint16) error {
	if err := d.Negotiate(want); err != nil {
		return err
	}
	d.Queues = nil
	for i := 0; ; i++ {
		d.SetReg(RegQueueSel, uint32(i))
		limit := d.Reg(RegQueueNumMax)
		if limit == 0 {
			break
		}
		d.Queues = append(d.Queues, d.newQueue(i, min(size, uint16(limit))))
	}
	d.SetReg(RegStatus, d.Reg(RegStatus)|StatusDriverOK)
	if s := d.Reg(RegStatus); s&StatusNeedsReset != 0 {
		return fmt.Errorf("device wants a reset: %w", d.T.Failure())
	}
	return nil
}

// Negotiate does Init's first half: the device has agreed on features but has no queues.
func (d *Driver) Negotiate(want uint64) error {
	if m, v := d.Reg(RegMagic), d.Reg(RegVersion); m != 0x74726976 || v != 2 {
		return fmt.Errorf("magic %#x, version %d", m, v)
	}
	d.SetReg(RegStatus, 0)
	if s := d.Reg(RegStatus); s != 0 {
		return fmt.Errorf("status is %#x after a reset", s)
	}
	d.SetReg(RegStatus, StatusAcknowledge)
	d.SetReg(RegStatus, StatusAcknowledge|StatusDriver)
	d.Features = d.Offered() & want
	for sel := range uint32(2) {
		d.SetReg(RegDriverSel, sel)
		d.SetReg(RegDriverFeatures, uint32(d.Features>>(32*sel)))
	}
	d.SetReg(RegStatus, StatusAcknowledge|StatusDriver|StatusFeaturesOK)
	if d.Reg(RegStatus)&StatusFeaturesOK == 0 {
		return fmt.Errorf("device refuses features %#x", d.Features)
	}
	return nil
}

// Alloc returns the address of n fresh bytes of low memory.
func (d *Driver) Alloc(n, align uint64) uint64 {
	d.next = (d.next + align - 1) / align * align
	at := d.next
	d.next += n
	if d.next > uint64(len(d.Mem.Low)) {
		panic("virtiotest: guest memory is full")
	}
	return at
}

// Mark returns where Alloc goes on.
func (d *Driver) Mark() uint64 { return d.next }

// Release frees all that was allocated since mark was taken.
func (d *Driver) Release(mark uint64) { d.next = mark }

// Bytes returns guest memory.
func (d *Driver) Bytes(addr, n uint64) []byte {
	b, err := d.Mem.Slice(addr, n)
	if err != nil {
		panic(err)
	}
	return b
}

// Interrupted does what the interrupt handler does: it reads and acknowledges the causes.
func (d *Driver) Interrupted() uint32 {
	v := d.Reg(RegInterrupt)
	d.SetReg(RegInterruptAck, v)
	return v
}

// Config reads n bytes of the configuration space.
func (d *Driver) Config(off, n uint64) []byte {
	b := make([]byte, n)
	for i := range n {
		d.T.Read(RegConfig+off+i, b[i:i+1])
	}
	return b
}
