package agent

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// heldFile is a file of the identity that stays open, so that a fork gives it new
// content with one system call: a path walk, an open and a close each cost an
// emulated guest hundreds of pieces of kernel code that it would run for nothing else.
type heldFile struct {
	path string
	mode os.FileMode

	fd       int // -1: there is no such file
	dev, ino uint64
	size     int64
}

// look opens the file, or opens it anew if somebody put another in its place, and
// learns its size. What it learned holds while user processes are frozen.
func (h *heldFile) look() {
	var st unix.Stat_t
	if err := unix.Lstat(h.path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		h.close()
		return
	}
	if h.fd < 0 || h.dev != st.Dev || h.ino != st.Ino {
		h.close()
		fd, err := unix.Open(h.path, unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			return
		}
		if err := unix.Fstat(fd, &st); err != nil {
			unix.Close(fd)
			return
		}
		h.fd, h.dev, h.ino = fd, st.Dev, st.Ino
	}
	if h.size = st.Size; h.size == 0 {
		// Its memory is there before a fork needs it. Not every file system can.
		_ = unix.Fallocate(h.fd, unix.FALLOC_FL_KEEP_SIZE, 0, 1)
	}
}

func (h *heldFile) close() {
	if h.fd >= 0 {
		unix.Close(h.fd)
	}
	h.fd = -1
}

// write gives the file new content on its inode, as writeInPlace does.
// Precondition: user processes have not run since look.
func (h *heldFile) write(content string) error {
	if h.fd < 0 {
		return writeInPlace(h.path, content, h.mode)
	}
	if n, err := unix.Pwrite(h.fd, []byte(content), 0); err != nil || n != len(content) {
		return fmt.Errorf("write %d of %d bytes to %s: %w", n, len(content), h.path, err)
	}
	if h.size > int64(len(content)) {
		if err := unix.Ftruncate(h.fd, int64(len(content))); err != nil {
			return fmt.Errorf("cut %s: %w", h.path, err)
		}
	}
	h.size = int64(len(content))
	return nil
}
