package linux

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// ReadProcess copies len(dst) bytes from address addr of process pid.
func ReadProcess(pid int, addr uint64, dst []byte) error {
	for len(dst) > 0 {
		local := []unix.Iovec{{Base: &dst[0]}}
		local[0].SetLen(len(dst))
		remote := []unix.RemoteIovec{{Base: uintptr(addr), Len: len(dst)}}
		n, err := unix.ProcessVMReadv(pid, local, remote, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("read %d bytes at %#x of process %d: %w", len(dst), addr, pid, err)
		}
		if n == 0 {
			return fmt.Errorf("read %d bytes at %#x of process %d: nothing there", len(dst), addr, pid)
		}
		dst, addr = dst[n:], addr+uint64(n)
	}
	return nil
}
