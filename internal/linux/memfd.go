package linux

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// MemFile creates an anonymous memory file of size bytes, all holes. The name is
// shown in /proc/PID/maps. The caller owns the file.
func MemFile(name string, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("create memory file %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), "memfd:"+name)
	if err := f.Truncate(size); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("size memory file %s to %d bytes: %w", name, size, err)
	}
	return f, nil
}

// immutableSeals forbid every change of content and size, and further sealing.
const immutableSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL

// SealImmutable makes f read-only for every descriptor of it, for ever. It fails
// while a writable shared mapping of f exists.
func SealImmutable(f *os.File) error {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, immutableSeals); err != nil {
		return fmt.Errorf("seal %s: %w", f.Name(), err)
	}
	return nil
}

// IsImmutable tells whether f is a memory file that SealImmutable has sealed.
func IsImmutable(f *os.File) bool {
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	return err == nil && seals&immutableSeals == immutableSeals
}

// NextData returns the next range [start, end) of f at or after off that is not
// a hole, or ok=false if there is none.
func NextData(f *os.File, off int64) (start, end int64, ok bool, err error) {
	start, err = unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
	if err == unix.ENXIO {
		return 0, 0, false, nil
	}
	if err != nil {
		return 0, 0, false, fmt.Errorf("seek data in %s: %w", f.Name(), err)
	}
	end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, false, fmt.Errorf("seek hole in %s: %w", f.Name(), err)
	}
	return start, end, true, nil
}
