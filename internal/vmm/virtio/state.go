package virtio

import (
	"encoding/binary"
	"errors"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices/devstate"
)

// StateVersion is the version of what AppendState writes.
const StateVersion = 1

// Limits of a state.
const (
	// MaxDeviceState bounds what a device may store.
	MaxDeviceState = 1 << 20
	maxReason      = 512
)

// AppendState appends registers, queues and the device's own state to b. The Transport
// is paused.
//
//	version u16, device type u32, status u8, interrupt causes u8, generation u32,
//	device feature select u32, driver feature select u32, queue select u32,
//	driver features u64, failure (length u32 and text),
//	number of queues u16, then for each: length u16, ready u8, three addresses u64,
//	next available u16, next used u16, signalled u16;
//	device state (length u32 and bytes)
func (t *Transport) AppendState(b []byte) []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	le := binary.LittleEndian
	b = le.AppendUint16(b, StateVersion)
	b = le.AppendUint32(b, t.dev.Type())
	b = append(b, byte(t.status), byte(t.isr.Load()))
	b = le.AppendUint32(b, t.generation.Load())
	b = le.AppendUint32(b, t.deviceSel)
	b = le.AppendUint32(b, t.driverSel)
	b = le.AppendUint32(b, t.queueSel)
	b = le.AppendUint64(b, t.driverFeatures)
	reason := ""
	if t.failure != nil {
		reason = t.failure.Error()
	}
	b = devstate.AppendBytes(b, []byte(reason[:min(len(reason), maxReason)]))
	b = le.AppendUint16(b, uint16(len(t.queues)))
	for _, q := range t.queues {
		b = q.appendState(b)
	}
	at := len(b)
	b = le.AppendUint32(b, 0)
	b = t.dev.AppendState(b)
	le.PutUint32(b[at:], uint32(len(b)-at-4))
	return b
}

// LoadState puts the device into a state that AppendState of a device with the same
// Config wrote, over the same guest memory. The Transport is paused; whatever state it
// was in is gone, also after an error, which leaves it reset. Damage is errdefs.ErrCorrupt; a
// device of another kind, or features this build lacks, errdefs.ErrIncompatible.
func (t *Transport) LoadState(b []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resetLocked()
	if err := t.loadLocked(b); err != nil {
		t.resetLocked()
		return fmt.Errorf("load device %s: %w", t.cfg.Name, err)
	}
	return nil
}

func (t *Transport) loadLocked(b []byte) error {
	d := devstate.NewDecoder(b, "virtio transport", StateVersion)
	if typ := d.Uint32(); d.Err() == nil && typ != t.dev.Type() {
		return errdefs.New(errdefs.ErrIncompatible, "state is of virtio device type %d, not %d", typ, t.dev.Type())
	}
	status := uint32(d.Uint8())
	t.isr.Store(uint32(d.Uint8()) & (causeQueue | causeConfig))
	t.generation.Store(d.Uint32())
	t.deviceSel, t.driverSel, t.queueSel = d.Uint32(), d.Uint32(), d.Uint32()
	t.driverFeatures = d.Uint64()
	if reason := d.Bytes(maxReason); len(reason) > 0 {
		t.failure = errdefs.As(errdefs.ErrGuest, errors.New(string(reason)))
	}
	if status&statusFeaturesOK != 0 && d.Err() == nil && !t.acceptableLocked() {
		return errdefs.New(errdefs.ErrIncompatible, "features %#x were agreed on, %#x are offered", t.driverFeatures, t.offered())
	}
	const known = statusAcknowledge | statusDriver | statusDriverOK | statusFeaturesOK | statusNeedsReset | statusFailed
	if status&^known != 0 || (status&statusDriverOK != 0 && status&statusFeaturesOK == 0) ||
		(status&statusNeedsReset != 0) != (t.failure != nil) {
		d.Fail("has status %#x", status)
	}
	if n := int(d.Uint16()); d.Err() == nil && n != len(t.queues) {
		return errdefs.New(errdefs.ErrIncompatible, "state has %d queues, the device %d", n, len(t.queues))
	}
	for i, q := range t.queues {
		t.negotiatedLocked(q)
		q.loadState(d, i, status&statusFeaturesOK != 0)
	}
	dev := d.Bytes(MaxDeviceState)
	if err := d.Close(); err != nil {
		return err
	}
	if err := t.dev.LoadState(dev); err != nil {
		return err
	}
	t.status = status
	if t.status&(statusDriverOK|statusNeedsReset|statusFailed) == statusDriverOK {
		t.dev.Start()
	}
	return nil
}

func (q *Queue) appendState(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint16(b, q.size)
	b = devstate.AppendBool(b, q.ready)
	b = le.AppendUint64(b, q.desc)
	b = le.AppendUint64(b, q.avail)
	b = le.AppendUint64(b, q.used)
	b = le.AppendUint16(b, q.nextAvail)
	b = le.AppendUint16(b, q.nextUsed)
	return le.AppendUint16(b, q.signalled)
}

func (q *Queue) loadState(d *devstate.Decoder, i int, featuresOK bool) {
	q.size = d.Uint16()
	ready := d.Bool()
	q.desc, q.avail, q.used = d.Uint64(), d.Uint64(), d.Uint64()
	q.nextAvail, q.nextUsed, q.signalled = d.Uint16(), d.Uint16(), d.Uint16()
	if d.Err() != nil || !ready {
		return
	}
	if !featuresOK {
		d.Fail("has a queue %d in use without agreed features", i)
		return
	}
	if err := q.enable(); err != nil {
		d.Fail("has a bad queue %d: %v", i, err)
	}
}
