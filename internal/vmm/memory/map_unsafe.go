package memory

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Guest memory is mapped outside of Go's heap: it never moves, and the garbage
// collector does not look into it. The mappings are made by raw addresses, because
// unix.Mmap keeps a table of its mappings that knows nothing of fixed ones.

func mapAnonymous(bytes uint64) ([]byte, error) {
	// SAFETY: the kernel chooses a free address; Close unmaps it.
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), bytes), nil
}

// mapFile replaces the mapping of at, a page-aligned part of a Space, by one of a file.
func mapFile(at []byte, fd int, offset uint64) error {
	// SAFETY: at lies inside of a mapping that this package made and owns, so that
	// MAP_FIXED replaces nothing else.
	_, err := unix.MmapPtr(fd, int64(offset), unsafe.Pointer(&at[0]), uintptr(len(at)), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_FIXED|unix.MAP_NORESERVE)
	return err
}

func unmap(b []byte) {
	// SAFETY: b is a whole mapping of mapAnonymous that nobody uses any more.
	_ = unix.MunmapPtr(unsafe.Pointer(&b[0]), uintptr(len(b)))
}

// address returns where b lies, for calls that take ranges of addresses.
func address(b []byte) uint64 {
	// SAFETY: only the number is used; guest memory does not move.
	return uint64(uintptr(unsafe.Pointer(&b[0])))
}

// Linux 6.7: include/uapi/linux/fs.h. TestScanConstants compares them with the
// installed header where it is new enough.
const (
	pagemapScan       = 0xc0606610
	pageIsWritten     = 1 << 1
	pageIsFile        = 1 << 2
	pageIsPresent     = 1 << 3
	pageIsSwapped     = 1 << 4
	pageIsPFNZero     = 1 << 5
	scanProtect       = 1 << 0 // PM_SCAN_WP_MATCHING
	scanArgLen        = 96
	regionsPerScan    = 4096
	uffdAPIVersion    = 0xaa
	uffdioAPI         = 0xc018aa3f
	uffdioRegister    = 0xc020aa00
	uffdRegisterWP    = 1 << 1
	uffdUserModeOnly  = 1
	uffdFeatureAsync  = 1 << 15
	uffdSyscallNumber = 323
)

// scanArg is struct pm_scan_arg.
type scanArg struct {
	Size, Flags, Start, End, WalkEnd, Vec, VecLen, MaxPages uint64
	Inverted, Mask, AnyOf, Return                           uint64
}

// region is struct page_region.
type region struct{ Start, End, Categories uint64 }

// scan makes one PAGEMAP_SCAN call.
func scan(fd int, arg *scanArg, out []region) (int, error) {
	for {
		// SAFETY: the kernel writes at most VecLen regions at Vec; out is alive until the
		// call returns because it is used below, and a Go slice on the heap does not move.
		arg.Vec, arg.VecLen = uint64(uintptr(unsafe.Pointer(&out[0]))), uint64(len(out))
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), pagemapScan, uintptr(unsafe.Pointer(arg)))
		if errno == 0 {
			return int(n), nil
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
}

type uffdAPIArg struct{ API, Features, Ioctls uint64 }

type uffdRegisterArg struct{ Start, Len, Mode, Ioctls uint64 }

// openTracking makes a userfault descriptor whose write protection resolves by itself.
func openTracking() (int, error) {
	fd, _, errno := unix.Syscall(uffdSyscallNumber, unix.O_CLOEXEC|unix.O_NONBLOCK|uffdUserModeOnly, 0, 0)
	if errno != 0 {
		return -1, errno
	}
	arg := uffdAPIArg{API: uffdAPIVersion, Features: uffdFeatureAsync}
	// SAFETY: arg has the kernel's layout and lives until the call returns.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uffdioAPI, uintptr(unsafe.Pointer(&arg))); errno != 0 {
		_ = unix.Close(int(fd))
		return -1, errno
	}
	return int(fd), nil
}

func registerTracking(fd int, b []byte) error {
	arg := uffdRegisterArg{Start: address(b), Len: uint64(len(b)), Mode: uffdRegisterWP}
	// SAFETY: as in openTracking.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uffdioRegister, uintptr(unsafe.Pointer(&arg))); errno != 0 {
		return errno
	}
	return nil
}
