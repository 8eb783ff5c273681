package memory

// Space is the memory of one machine.
type Space struct {
	mem  []byte // the whole mapping
	size uint64 // bytes, a multiple of PageSize
}

// Size returns the bytes of memory.
func (s *Space) Size() uint64 { return s.size }
