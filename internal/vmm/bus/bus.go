// Package bus leads accesses of a guest to ports and MMIO windows to devices.
//
// A [Bus] is built before the machine runs and is read-only from then on, so that
// all vCPUs use it without a lock. What no device owns reads as ones and ignores
// writes, as on real hardware: a guest may touch anything, and nobody fails but
// itself.
package bus

import (
	"sort"

	"forkd.dev/forkd/internal/errdefs"
)

// Handler is a device as the bus sees it. Calls come from several vCPUs at once. The
// offset is relative to the window and offset+len(p) lies inside of it; len(p) is 1 to 8.
type Handler interface {
	Read(offset uint64, p []byte)
	Write(offset uint64, p []byte)
}

type window struct {
	start, length uint64
	handler       Handler
}

// Bus is one address space of devices. The zero value is empty.
type Bus struct{ windows []window }

// Add gives length addresses from start on to h. ErrConflict: some belong to another.
func (b *Bus) Add(start, length uint64, h Handler) error {
	if length == 0 || start+length < start {
		return errdefs.New(errdefs.ErrInvalid, "add device at %#x+%#x: bad window", start, length)
	}
	i := sort.Search(len(b.windows), func(i int) bool { return b.windows[i].start >= start })
	if (i > 0 && b.windows[i-1].start+b.windows[i-1].length > start) ||
		(i < len(b.windows) && b.windows[i].start < start+length) {
		return errdefs.New(errdefs.ErrConflict, "add device at %#x+%#x: the addresses are taken", start, length)
	}
	b.windows = append(b.windows, window{})
	copy(b.windows[i+1:], b.windows[i:])
	b.windows[i] = window{start, length, h}
	return nil
}

func (b *Bus) find(address uint64, n int) (Handler, uint64) {
	i := sort.Search(len(b.windows), func(i int) bool { return b.windows[i].start > address })
	if i == 0 {
		return nil, 0
	}
	w := b.windows[i-1]
	offset := address - w.start
	if offset >= w.length || uint64(n) > w.length-offset {
		return nil, 0
	}
	return w.handler, offset
}

// Read fills p with what address holds.
func (b *Bus) Read(address uint64, p []byte) {
	if h, offset := b.find(address, len(p)); h != nil {
		h.Read(offset, p)
		return
	}
	for i := range p {
		p[i] = 0xff
	}
}

// Write stores p at address.
func (b *Bus) Write(address uint64, p []byte) {
	if h, offset := b.find(address, len(p)); h != nil {
		h.Write(offset, p)
	}
}
