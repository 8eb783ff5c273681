package virtio

import (
	"encoding/binary"
	"fmt"
)

// WindowSize is how many bytes of guest-physical addresses a device takes.
const WindowSize = 0x1000

// RegQueueNotify is the offset of the register that an ioeventfd (4 bytes) is put on.
const RegQueueNotify = 0x50

// Offsets of the registers (4.2.2).
const (
	regMagic          = 0x00
	regVersion        = 0x04
	regDeviceID       = 0x08
	regVendorID       = 0x0c
	regDeviceFeatures = 0x10
	regDeviceSel      = 0x14
	regDriverFeatures = 0x20
	regDriverSel      = 0x24
	regQueueSel       = 0x30
	regQueueNumMax    = 0x34
	regQueueNum       = 0x38
	regQueueReady     = 0x44
	regInterrupt      = 0x60
	regInterruptAck   = 0x64
	regStatus         = 0x70
	regDescLow        = 0x80
	regDescHigh       = 0x84
	regDriverLow      = 0x90
	regDriverHigh     = 0x94
	regDeviceLow      = 0xa0
	regDeviceHigh     = 0xa4
	regShmLenLow      = 0xb0
	regShmBaseHigh    = 0xbc
	regQueueReset     = 0xc0
	regGeneration     = 0xfc
	regConfig         = 0x100
)

const (
	magicValue = 0x74726976 // "virt"
	version2   = 2
	vendorID   = 0x64726b66 // "fkrd"
)

// Read answers a read of len(p) bytes at offset off of the window. Reads that the specification does
// not know give zeros.
func (t *Transport) Read(off uint64, p []byte) {
	clear(p)
	if off >= regConfig {
		if off < WindowSize {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.dev.ReadConfig(p, uint32(off-regConfig))
		}
		return
	}
	if len(p) != 4 || off%4 != 0 {
		return
	}
	binary.LittleEndian.PutUint32(p, t.readRegister(off))
}

func (t *Transport) readRegister(off uint64) uint32 {
	switch off {
	case regMagic:
		return magicValue
	case regVersion:
		return version2
	case regDeviceID:
		return t.dev.Type()
	case regVendorID:
		return vendorID
	case regInterrupt:
		return t.isr.Load()
	case regGeneration:
		return t.generation.Load()
	}
	if off >= regShmLenLow && off <= regShmBaseHigh {
		return ^uint32(0) // there is no shared memory region
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch off {
	case regDeviceFeatures:
		return half(t.offered(), t.deviceSel)
	case regStatus:
		return t.status
	}
	q := t.selectedLocked()
	if q == nil {
		return 0
	}
	switch off {
	case regQueueNumMax:
		return uint32(q.limit)
	case regQueueReady:
		if q.ready {
			return 1
		}
	}
	return 0
}

// Write takes a write of p at offset off of the window. It may process queues before it
// returns. Writes that make no sense are ignored; those that break the device put it into NEEDS_RESET.
func (t *Transport) Write(off uint64, p []byte) {
	if off >= regConfig {
		if off < WindowSize {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.dev.WriteConfig(p, uint32(off-regConfig))
		}
		return
	}
	if len(p) != 4 || off%4 != 0 {
		return
	}
	v := binary.LittleEndian.Uint32(p)
	switch off {
	case RegQueueNotify:
		if v < uint32(len(t.queues)) {
			t.Kick(int(v))
		}
	case regInterruptAck:
		t.isr.And(^v)
	case regStatus:
		if t.writeStatus(v) {
			t.KickAll()
		}
	default:
		t.writeRegister(off, v)
	}
}

func (t *Transport) writeRegister(off uint64, v uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch off {
	case regDeviceSel:
		t.deviceSel = v
	case regDriverSel:
		t.driverSel = v
	case regDriverFeatures:
		if t.status&statusFeaturesOK == 0 {
			setHalf(&t.driverFeatures, t.driverSel, v)
		}
	case regQueueSel:
		t.queueSel = v
	default:
		if q := t.selectedLocked(); q != nil {
			t.writeQueueLocked(q, off, v)
		}
	}
}

func (t *Transport) writeQueueLocked(q *Queue, off uint64, v uint32) {
	switch off {
	case regQueueReset:
		if v == 1 && t.driverFeatures&FeatureRingReset != 0 {
			t.resetQueueLocked(q)
		}
		return
	case regQueueReady:
		t.queueReadyLocked(q, v)
		return
	}
	if q.ready {
		return // a queue in use does not change
	}
	switch off {
	case regQueueNum:
		q.size = uint16(min(v, 0xffff))
	case regDescLow:
		setHalf(&q.desc, 0, v)
	case regDescHigh:
		setHalf(&q.desc, 1, v)
	case regDriverLow:
		setHalf(&q.avail, 0, v)
	case regDriverHigh:
		setHalf(&q.avail, 1, v)
	case regDeviceLow:
		setHalf(&q.used, 0, v)
	case regDeviceHigh:
		setHalf(&q.used, 1, v)
	}
}

func (t *Transport) queueReadyLocked(q *Queue, v uint32) {
	switch {
	case v == 0:
		t.resetQueueLocked(q)
	case q.ready || t.status&(statusFeaturesOK|statusNeedsReset) != statusFeaturesOK:
	default:
		t.negotiatedLocked(q)
		if err := q.enable(); err != nil {
			t.failLocked(fmt.Errorf("queue %d: %w", t.queueSel, err))
		}
	}
}

func (t *Transport) negotiatedLocked(q *Queue) {
	q.eventIdx = t.driverFeatures&FeatureEventIdx != 0
	q.indirect = t.driverFeatures&FeatureIndirect != 0
}

func (t *Transport) resetQueueLocked(q *Queue) {
	if r, ok := t.dev.(queueResetter); ok && q.ready {
		r.ResetQueue(int(t.queueSel))
	}
	q.reset()
}

func (t *Transport) selectedLocked() *Queue {
	if t.queueSel < uint32(len(t.queues)) {
		return t.queues[t.queueSel]
	}
	return nil
}

func (t *Transport) offered() uint64 { return t.dev.Features() | commonFeatures }

// writeStatus returns true if the driver has become ready.
func (t *Transport) writeStatus(v uint32) (started bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v == 0 {
		t.resetLocked()
		return false
	}
	added := v &^ t.status & (statusAcknowledge | statusDriver | statusDriverOK | statusFeaturesOK | statusFailed)
	if added&statusFeaturesOK != 0 && !t.acceptableLocked() {
		added &^= statusFeaturesOK // the driver reads it back and gives up
	}
	if added&statusDriverOK != 0 && (t.status|added)&statusFeaturesOK == 0 {
		t.failLocked(guestError("driver is ready without agreed features"))
		return false
	}
	t.status |= added
	if added&statusDriverOK == 0 || t.status&(statusNeedsReset|statusFailed) != 0 {
		return false
	}
	t.dev.Start()
	return true
}

// acceptableLocked tells whether the device can work with what the driver chose.
func (t *Transport) acceptableLocked() bool {
	return t.driverFeatures&^t.offered() == 0 && t.driverFeatures&FeatureVersion1 != 0
}

func (t *Transport) resetLocked() {
	t.dev.Reset()
	for _, q := range t.queues {
		q.reset()
	}
	t.status, t.failure = 0, nil
	t.deviceSel, t.driverSel, t.queueSel, t.driverFeatures = 0, 0, 0, 0
	t.isr.Store(0)
}

// half returns 32 of the 64 bits of v, or zero beyond.
func half(v uint64, sel uint32) uint32 {
	switch sel {
	case 0:
		return uint32(v)
	case 1:
		return uint32(v >> 32)
	}
	return 0
}

func setHalf(v *uint64, sel, to uint32) {
	switch sel {
	case 0:
		*v = *v&^0xffffffff | uint64(to)
	case 1:
		*v = *v&0xffffffff | uint64(to)<<32
	}
}
