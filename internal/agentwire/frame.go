package agentwire

import (
	"encoding/binary"
	"hash/crc32"
)

// FrameType is the first byte of a frame.
type FrameType uint8

// The frame types. "Code" is the second byte of the payload of coded frames,
// after their flags.
const (
	// FrameHello and FrameHelloAck are the handshake (Hello, HelloAck).
	FrameHello FrameType = iota + 1
	FrameHelloAck
	// FrameCall asks for a method: flags, method, body. FrameReply ends it: flags,
	// status, body. Both are split over frames with FlagMore if the body is long.
	FrameCall
	FrameReply
	// FrameNote is said within a running call by either side: flags, note, body.
	FrameNote
	// FrameCancel asks to end a running call; its reply still comes.
	FrameCancel
	// FrameData is reserved for live standard streams of a running call: channel, bytes.
	FrameData
	// FrameOpen opens a byte stream: window u32, kind. The peer answers with
	// FrameWindow (accepted, its credit) or FrameClose (refused).
	FrameOpen
	FrameStreamData
	// FrameWindow adds credit: u32.
	FrameWindow
	// FrameClose ends a direction of a stream or all of it: mode, text.
	FrameClose
)

// Limits of frames.
const (
	// MaxPayload is the most a frame may carry.
	MaxPayload = 64 << 10
	// ChunkSize is how much of a long body this build puts into one frame: an
	// encoded frame fits the 32 KiB that a virtio-console port takes at once.
	ChunkSize = 32000

	headerSize = 1 + 4 + 4
	sumSize    = 4
	maxRaw     = headerSize + MaxPayload + sumSize
	maxEncoded = maxRaw + maxRaw/cobsBlock + 2
)

// FlagMore in the flags of a coded frame: the body goes on in the next frame of
// the same type and id.
const FlagMore = 1

// Mark is the byte that ends a frame and aborts a half-sent one.
const Mark = 0

// Frame is one unit on the channel.
type Frame struct {
	Type    FrameType
	ID      uint32
	Payload []byte
}

// castagnoli returns the CRC-32C table; the standard library makes it once.
func castagnoli() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) }

// AppendFrame appends the encoded frame, mark included. The payload is the
// concatenation of parts, at most MaxPayload bytes.
func AppendFrame(dst []byte, t FrameType, id uint32, parts ...[]byte) []byte {
	size := 0
	for _, p := range parts {
		size += len(p)
	}
	var header [headerSize]byte
	header[0] = byte(t)
	binary.LittleEndian.PutUint32(header[1:], id)
	binary.LittleEndian.PutUint32(header[5:], uint32(size))
	sum := crc32.Update(0, castagnoli(), header[:])
	enc := newCOBS(dst)
	enc.write(header[:])
	for _, p := range parts {
		sum = crc32.Update(sum, castagnoli(), p)
		enc.write(p)
	}
	enc.write(binary.LittleEndian.AppendUint32(nil, sum))
	return append(enc.finish(), Mark)
}

// parseFrame decodes one encoded frame without its mark, in place.
func parseFrame(b []byte) (Frame, string) {
	raw, ok := decodeCOBS(b)
	if !ok {
		return Frame{}, "bad byte stuffing"
	}
	if len(raw) < headerSize+sumSize {
		return Frame{}, "too short"
	}
	payload := raw[headerSize : len(raw)-sumSize]
	if uint64(binary.LittleEndian.Uint32(raw[5:])) != uint64(len(payload)) {
		return Frame{}, "wrong length"
	}
	if len(payload) > MaxPayload {
		return Frame{}, "too long"
	}
	sum := binary.LittleEndian.Uint32(raw[len(raw)-sumSize:])
	if crc32.Checksum(raw[:len(raw)-sumSize], castagnoli()) != sum {
		return Frame{}, "wrong checksum"
	}
	return Frame{Type: FrameType(raw[0]), ID: binary.LittleEndian.Uint32(raw[1:]), Payload: payload}, ""
}

// Coded splits the payload of a call, reply or note.
func (f Frame) Coded() (flags, code byte, body []byte, ok bool) {
	if len(f.Payload) < 2 {
		return 0, 0, nil, false
	}
	return f.Payload[0], f.Payload[1], f.Payload[2:], true
}
