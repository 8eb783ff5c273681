package kvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// ioctl repeats a request while signals interrupt it. It uses Syscall, never
// RawSyscall: the garbage collector would wait for as long as the call takes.
func ioctl(fd int, request uintptr, arg uintptr, name string) (int, error) {
	for {
		v, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, arg)
		if errno == 0 {
			return int(v), nil
		}
		if errno != unix.EINTR {
			return -1, fmt.Errorf("%s: %w", name, classify(errno))
		}
	}
}

// ioctlPtr is ioctl for requests that take an address.
func ioctlPtr[T any](fd int, request uintptr, arg *T, name string) error {
	for {
		// SAFETY: arg is what the request expects (TestHeader compares sizes and layouts)
		// and the conversion stands in the call, so that it lives until the return.
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(arg)))
		if errno == 0 {
			return nil
		}
		if errno != unix.EINTR {
			return fmt.Errorf("%s: %w", name, classify(errno))
		}
	}
}

// ioctlCount is ioctlPtr for requests whose result counts.
func ioctlCount[T any](fd int, request uintptr, arg *T, name string) (int, error) {
	for {
		// SAFETY: as in ioctlPtr.
		v, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(arg)))
		if errno == 0 {
			return int(v), nil
		}
		if errno != unix.EINTR {
			return -1, fmt.Errorf("%s: %w", name, classify(errno))
		}
	}
}

func classify(errno unix.Errno) error {
	switch errno {
	case unix.ENOENT, unix.ENODEV, unix.ENXIO:
		return errdefs.As(errdefs.ErrNotFound, errno)
	case unix.EACCES, unix.EPERM:
		return errdefs.As(errdefs.ErrPermission, errno)
	case unix.ENOMEM, unix.EMFILE, unix.ENFILE, unix.ENOSPC:
		return errdefs.As(errdefs.ErrResourceExhausted, errno)
	case unix.ENOTTY, unix.EOPNOTSUPP, unix.ENOSYS:
		return errdefs.As(errdefs.ErrUnsupported, errno)
	}
	return errno
}

// SetMemory makes host memory the guest's at address; a slot that exists is
// replaced, empty memory removes it. The memory must stay mapped while the VM lives.
func (m *VM) SetMemory(slot uint32, address uint64, memory []byte) error {
	region := memoryRegion{Slot: slot, GuestAddress: address, Size: uint64(len(memory))}
	if len(memory) > 0 {
		// SAFETY: memory is a mapping of the process, not of Go's heap: it does not move,
		// and the owner unmaps it after the VM is closed.
		region.UserspaceAddr = uint64(uintptr(unsafe.Pointer(&memory[0])))
	}
	return ioctlPtr(m.fd, setUserMemoryRegion, &region, "KVM_SET_USER_MEMORY_REGION")
}

// mapRun maps struct kvm_run of a vCPU.
func mapRun(fd, size int) ([]byte, error) {
	// SAFETY: the kernel chooses the address; Close unmaps it.
	p, err := unix.MmapPtr(fd, 0, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map state of vCPU: %w", err)
	}
	return unsafe.Slice((*byte)(p), size), nil
}

func unmapRun(b []byte) {
	// SAFETY: b came from mapRun and nobody uses it any more.
	_ = unix.MunmapPtr(unsafe.Pointer(&b[0]), uintptr(len(b)))
}

// RequestExit makes the next or, together with a signal to its thread, the current
// Run return with ErrInterrupted. It may be called from any thread, any number of times.
func (c *VCPU) RequestExit() { c.storeImmediateExit(1 << (8 * runImmediateExit)) }

// ClearExit takes back RequestExit. Only the vCPU's own goroutine calls it.
func (c *VCPU) ClearExit() { c.storeImmediateExit(0) }

func (c *VCPU) storeImmediateExit(v uint32) {
	// SAFETY: the mapping is page-aligned and lives until Close; the four bytes are an
	// input that is always 0, immediate_exit and padding.
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&c.run[0])), v)
}

// ErrInterrupted is what Run returns when it was told to by RequestExit and a signal.
var ErrInterrupted = errors.New("vCPU was interrupted")

// Run runs the guest until it needs something. ErrInterrupted: a signal or RequestExit.
func (c *VCPU) Run() error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(c.fd), run, 0)
	switch errno {
	case 0:
		return nil
	case unix.EINTR, unix.EAGAIN:
		return ErrInterrupted
	}
	return fmt.Errorf("KVM_RUN: %w", classify(errno))
}

// ExitReason tells why Run returned, one of the Exit constants.
func (c *VCPU) ExitReason() uint32 { return binary.LittleEndian.Uint32(c.run[runExitReason:]) }
