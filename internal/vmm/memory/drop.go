package memory

import (
	"fmt"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// Drop gives the private pages of n bytes from a on, both multiples of PageSize, back to the host. They
// hold what the mapping holds below them afterwards: the content of a free page is nobody's. vCPUs may run.
//
// Whether tracking calls a dropped page changed is undefined too, as is what a capture stores for it.
func (s *Space) Drop(a Address, n uint64) error {
	off, err := s.offset(a, n)
	if err != nil {
		return err
	}
	if off%PageSize != 0 || n%PageSize != 0 {
		return errdefs.New(errdefs.ErrInvalid, "drop guest range %#x+%d: not whole pages", uint64(a), n)
	}
	if n == 0 {
		return nil
	}
	if err := unix.Madvise(s.mem[off:off+n], unix.MADV_DONTNEED); err != nil {
		return fmt.Errorf("drop guest range %#x+%d: %w", uint64(a), n, err)
	}
	return nil
}
