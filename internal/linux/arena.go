package linux

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Touched returns n bytes of zeroed private memory whose pages exist already, so
// that writing to it takes no page faults. Free gives it back.
func Touched(n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, classify(err))
	}
	return b, nil
}

// Free unmaps what Touched returned.
func Free(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	if err := unix.Munmap(b); err != nil {
		return fmt.Errorf("unmap %d bytes: %w", len(b), classify(err))
	}
	return nil
}
