package virtio

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// The guest reads and writes ring indexes while we do. A 16-bit index must be loaded
// and stored by one instruction, which neither sync/atomic (32 bits at least, while an
// available ring is aligned to 2) nor encoding/binary (bytes, joined only by an
// optimizing compiler) promises.

// load16 reads the little-endian number at b[off], off even.
//
//go:noinline
func load16(b []byte, off int) uint16 {
	_ = b[off+1]
	// SAFETY: in bounds by the line above, aligned because rings are (checked when a
	// queue is made ready) and GuestMemory keeps alignment.
	v := *(*uint16)(unsafe.Pointer(&b[off]))
	if bigEndian {
		return v<<8 | v>>8
	}
	return v
}

// store16 writes v little-endian at b[off], off even. On amd64 stores become visible
// in order, so what was written to a ring before is seen before the index.
//
//go:noinline
func store16(b []byte, off int, v uint16) {
	_ = b[off+1]
	if bigEndian {
		v = v<<8 | v>>8
	}
	// SAFETY: as in load16.
	*(*uint16)(unsafe.Pointer(&b[off])) = v
}

// bigEndian: guest memory is little-endian on every host.
var bigEndian = binary.NativeEndian.Uint16([]byte{0, 1}) == 1

// fence orders a store before a later load, as the notification protocol needs. The
// word belongs to one queue, so that fences of different devices share no cache line.
func fence(word *uint32) { atomic.AddUint32(word, 1) }
