package memory

import (
	"forkd.dev/forkd/internal/errdefs"
)

// PageSize is the unit in which memory is mapped, tracked and stored.
const PageSize = 4096

// Address is a guest-physical address.
type Address uint64

// The address map of a machine. Everything else between LowEnd and HighStart belongs
// to nobody: access there reads as ones.
const (
	LowEnd    Address = 3 << 30 // memory below is at its own address
	HighStart Address = 4 << 30 // memory beyond LowEnd continues here
	// MMIOStart is where the windows of virtio-mmio devices begin.
	MMIOStart Address = 0xd0000000
)

// Guest is what a device may do with guest memory.
type Guest interface {
	// Slice returns n bytes at a, shared with the guest. ErrInvalid: the range is
	// not all inside one piece of memory. The slice is valid until the Space is closed.
	Slice(a Address, n uint64) ([]byte, error)
	// ReadAt fills p from a, WriteAt stores p at a; all or nothing.
	ReadAt(p []byte, a Address) error
	WriteAt(p []byte, a Address) error
}

// offset turns a checked guest range into an offset in the mapping.
func (s *Space) offset(a Address, n uint64) (uint64, error) {
	low := min(s.size, uint64(LowEnd))
	if end := uint64(a) + n; end >= uint64(a) && end <= low {
		return uint64(a), nil
	}
	if a >= HighStart {
		high := s.size - low
		rel := uint64(a - HighStart)
		if end := rel + n; end >= rel && end <= high {
			return low + rel, nil
		}
	}
	return 0, errdefs.New(errdefs.ErrInvalid, "guest range %#x+%d is not inside of its memory", uint64(a), n)
}

// Slice implements [Guest].
func (s *Space) Slice(a Address, n uint64) ([]byte, error) {
	off, err := s.offset(a, n)
	if err != nil {
		return nil, err
	}
	return s.mem[off : off+n : off+n], nil
}

// ReadAt implements [Guest].
func (s *Space) ReadAt(p []byte, a Address) error {
	b, err := s.Slice(a, uint64(len(p)))
	if err != nil {
		return err
	}
	copy(p, b)
	return nil
}

// WriteAt implements [Guest].
func (s *Space) WriteAt(p []byte, a Address) error {
	b, err := s.Slice(a, uint64(len(p)))
	if err != nil {
		return err
	}
	copy(b, p)
	return nil
}
