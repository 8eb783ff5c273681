package linux

import (
	"encoding/binary"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The ioctls of linux/random.h and fs/ext4/ext4.h that a guest's agent uses.
const (
	rndAddEntropy  = 0x40085203
	rndReseedCRNG  = 0x5207
	ext4ResizeFS   = 0x40086610
	blkGetSize64   = 0x80081272
	maxEntropySize = 4096
)

// RandomPool is the kernel's random pool, held open by a guest that will have to
// seed it with as few steps as possible.
type RandomPool struct {
	f *os.File
	// info is a struct rand_pool_info: entropy in bits, size in bytes, the bytes.
	info []byte
}

// OpenRandomPool opens the pool. The descriptor is a blocking one, which stays out
// of the runtime's poller.
func OpenRandomPool() (*RandomPool, error) {
	fd, err := unix.Open("/dev/urandom", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open random pool: %w", classify(err))
	}
	return &RandomPool{f: os.NewFile(uintptr(fd), "/dev/urandom"), info: make([]byte, 0, 8+64)}, nil
}

// Close closes the pool.
func (p *RandomPool) Close() error { return p.f.Close() }

// Seed credits seed to the pool and reseeds the kernel's generator from it at once,
// so that every later read differs from that of a machine with another seed. It
// needs CAP_SYS_ADMIN and must not be called concurrently.
func (p *RandomPool) Seed(seed []byte) error {
	if len(seed) == 0 || len(seed) > maxEntropySize {
		return fmt.Errorf("seed random pool: %d bytes: %w", len(seed), classify(unix.EINVAL))
	}
	p.info = binary.NativeEndian.AppendUint32(p.info[:0], uint32(8*len(seed)))
	p.info = binary.NativeEndian.AppendUint32(p.info, uint32(len(seed)))
	p.info = append(p.info, seed...)
	defer clear(p.info)
	// SAFETY: the kernel reads 8 bytes and as many as they say, all within info.
	if err := ioctlPointer(p.f, rndAddEntropy, unsafe.Pointer(&p.info[0])); err != nil {
		return fmt.Errorf("seed random pool: %w", err)
	}
	if err := ioctlPointer(p.f, rndReseedCRNG, nil); err != nil {
		return fmt.Errorf("reseed random generator: %w", err)
	}
	return nil
}

// BlockDeviceSize returns the bytes of a block device.
func BlockDeviceSize(dev *os.File) (uint64, error) {
	var size uint64
	// SAFETY: the kernel writes 8 bytes to size.
	if err := ioctlPointer(dev, blkGetSize64, unsafe.Pointer(&size)); err != nil {
		return 0, fmt.Errorf("size of %s: %w", dev.Name(), err)
	}
	return size, nil
}

// GrowExt4 grows the mounted ext4 file system that dir is on to blocks blocks.
func GrowExt4(dir *os.File, blocks uint64) error {
	// SAFETY: the kernel reads 8 bytes from blocks.
	if err := ioctlPointer(dir, ext4ResizeFS, unsafe.Pointer(&blocks)); err != nil {
		return fmt.Errorf("grow file system at %s: %w", dir.Name(), err)
	}
	return nil
}

func ioctlPointer(f *os.File, request uintptr, arg unsafe.Pointer) error {
	_, err := retryEINTR(func() (struct{}, error) {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg))
		if errno != 0 {
			return struct{}{}, errno
		}
		return struct{}{}, nil
	})
	return classify(err)
}
