package vmmwire

import (
	"encoding/binary"

	"forkd.dev/forkd/internal/errdefs"
)

const headerLen = 8

// Message is any message of the protocol.
type Message interface {
	Kind() Kind
	encode(e *encoder)
	// decode fills the message from fields and checks it; files is how many
	// descriptors came with the packet.
	decode(d *decoder, files int)
}

// Encode returns the packet of m. ErrInvalid: it is longer than MaxMessage.
func Encode(seq uint32, m Message) ([]byte, error) {
	e := encoder{b: make([]byte, headerLen, 256)}
	e.b[0] = byte(m.Kind())
	binary.LittleEndian.PutUint32(e.b[4:], seq)
	m.encode(&e)
	if len(e.b) > MaxMessage {
		return nil, errdefs.New(errdefs.ErrInvalid, "encode message of kind %d: %d bytes, more than %d", m.Kind(), len(e.b), MaxMessage)
	}
	return e.b, nil
}

// Decode reads a packet that came with that many descriptors. What it returns
// shares no memory with packet.
func Decode(packet []byte, files int) (seq uint32, m Message, err error) {
	if len(packet) < headerLen || len(packet) > MaxMessage {
		return 0, nil, errdefs.New(errdefs.ErrInvalid, "decode message: packet of %d bytes", len(packet))
	}
	seq = binary.LittleEndian.Uint32(packet[4:])
	kind := Kind(packet[0])
	if packet[1] != 0 || packet[2] != 0 || packet[3] != 0 {
		return seq, nil, errdefs.New(errdefs.ErrInvalid, "decode message of kind %d: reserved bytes are set", kind)
	}
	if m = newMessage(kind); m == nil {
		return seq, nil, errdefs.New(errdefs.ErrInvalid, "decode message: unknown kind %d", kind)
	}
	d := &decoder{b: packet[headerLen:]}
	m.decode(d, files)
	if d.err != nil {
		return seq, nil, errdefs.New(errdefs.ErrInvalid, "decode message of kind %d: %w", kind, d.err)
	}
	return seq, m, nil
}

// Simple is a message without content: KindPause, KindResume, KindCaptureAbort,
// KindStored, KindStats, KindQuit or KindDone.
type Simple struct{ Of Kind }

// Kind implements [Message].
func (m *Simple) Kind() Kind { return m.Of }

func (m *Simple) encode(*encoder) {}

func (m *Simple) decode(d *decoder, _ int) {
	for d.next() {
	}
}

func newMessage(k Kind) Message {
	switch k {
	case KindHello:
		return &Hello{}
	case KindBoot:
		return &Boot{}
	case KindRestore:
		return &Restore{}
	case KindCaptureBegin:
		return &CaptureBegin{}
	case KindCaptureEnd:
		return &CaptureEnd{}
	case KindRollback:
		return &Rollback{}
	case KindCaptured:
		return &Captured{}
	case KindStatsReply:
		return &Stats{}
	case KindFailed:
		return &Failed{}
	case KindEnded:
		return &Ended{}
	case KindPause, KindResume, KindCaptureAbort, KindStored, KindStats, KindQuit, KindDone:
		return &Simple{Of: k}
	}
	return nil
}

// file reads a position among the packet's descriptors, stored plus one.
func (d *decoder) file(files int) int {
	if n := d.number(uint64(files)); n > 0 {
		return int(n - 1)
	}
	d.fail("field %d refers to no descriptor", d.tag)
	return NoFile
}

func (e *encoder) file(tag uint64, position int) { e.uint(tag, uint64(position+1)) }

// need reports a missing field.
func (d *decoder) need(ok bool, what string) {
	if !ok {
		d.fail("%s is missing", what)
	}
}
