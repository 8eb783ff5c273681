package block

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layerfmt/cow1"
)

// File is a file of a disk as cow1 wants it: it gives space back and syncs only data.
type File struct{ *os.File }

var (
	_ cow1.File        = File{}
	_ cow1.HolePuncher = File{}
)

// PunchHole implements cow1.HolePuncher. A file system that cannot give space back gets
// zeros instead.
func (f File) PunchHole(off, n int64) error {
	err := f.control(func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
	})
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	zeros := make([]byte, min(n, 1<<20))
	for n > 0 {
		part := zeros[:min(n, int64(len(zeros)))]
		if _, err := f.WriteAt(part, off); err != nil {
			return err
		}
		off, n = off+int64(len(part)), n-int64(len(part))
	}
	return nil
}

// Sync implements cow1.File: data and the length, not times.
func (f File) Sync() error {
	return f.control(func(fd int) error { return unix.Fdatasync(fd) })
}

func (f File) control(call func(fd int) error) error {
	c, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("disk file: %w", err)
	}
	var result error
	if err := c.Control(func(fd uintptr) {
		for result = unix.EINTR; errors.Is(result, unix.EINTR); {
			result = call(int(fd))
		}
	}); err != nil {
		return fmt.Errorf("disk file: %w", err)
	}
	return result
}
