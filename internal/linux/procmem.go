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

// WriteProcess copies src to address addr of process pid.
func WriteProcess(pid int, addr uint64, src []byte) error {
	for len(src) > 0 {
		local := []unix.Iovec{{Base: &src[0]}}
		local[0].SetLen(len(src))
		remote := []unix.RemoteIovec{{Base: uintptr(addr), Len: len(src)}}
		n, err := unix.ProcessVMWritev(pid, local, remote, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("write %d bytes at %#x of process %d: %w", len(src), addr, pid, err)
		}
		if n == 0 {
			return fmt.Errorf("write %d bytes at %#x of process %d: nothing there", len(src), addr, pid)
		}
		src, addr = src[n:], addr+uint64(n)
	}
	return nil
}

// maxIovecs is IOV_MAX (include/uapi/linux/uio.h).
const maxIovecs = 1024

// ReadPages copies the pages of runs, which start at address base of process pid,
// one after the other to dst, with as few calls as possible.
func ReadPages(pid int, base uint64, runs []PageRun, dst []byte) error {
	for len(runs) > 0 {
		batch := runs[:min(len(runs), maxIovecs)]
		runs = runs[len(batch):]
		remote := make([]unix.RemoteIovec, len(batch))
		total := 0
		for i, r := range batch {
			remote[i] = unix.RemoteIovec{Base: uintptr(base + r.Start*PageSize), Len: int(r.Count * PageSize)}
			total += remote[i].Len
		}
		local := []unix.Iovec{{Base: &dst[0]}}
		local[0].SetLen(total)
		n, err := unix.ProcessVMReadv(pid, local, remote, 0)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("read %d runs of pages of process %d: %w", len(batch), pid, err)
		}
		if err != nil || n != total { // cut short: take them one by one
			if err := readEach(pid, base, batch, dst[:total]); err != nil {
				return err
			}
		}
		dst = dst[total:]
	}
	return nil
}

func readEach(pid int, base uint64, runs []PageRun, dst []byte) error {
	for _, r := range runs {
		n := r.Count * PageSize
		if err := ReadProcess(pid, base+r.Start*PageSize, dst[:n]); err != nil {
			return err
		}
		dst = dst[n:]
	}
	return nil
}
