package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// readLimited reads a file of the guest, at most limit bytes of it.
func readLimited(path string, limit int64) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("read %s: not a regular file", path)
	}
	var out []byte
	buf := make([]byte, 4096)
	for int64(len(out)) < limit {
		n, err := unix.Read(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		if n == 0 {
			break
		}
		out = append(out, buf[:n]...)
	}
	return out[:min(int64(len(out)), limit)], nil
}

// writeInPlace gives a file new content on its old inode, so that bind mounts,
// memory maps and watches of it go on. The content is in place before anything
// behind it is cut off.
//
// A fork does this several times before its first answer, and in an emulated
// guest each path of the kernel costs its translation once more: so it is plain
// system calls, and a file that keeps its length is not cut.
func writeInPlace(path, content string, mode os.FileMode) error {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_CLOEXEC | unix.O_NOFOLLOW
	fd, err := unix.Open(path, flags, uint32(mode.Perm()))
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		fd, err = unix.Open(path, flags, uint32(mode.Perm()))
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	if n, err := unix.Pwrite(fd, []byte(content), 0); err != nil || n != len(content) {
		return fmt.Errorf("write %d of %d bytes to %s: %w", n, len(content), path, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	if st.Size == int64(len(content)) {
		return nil
	}
	if err := unix.Ftruncate(fd, int64(len(content))); err != nil {
		return fmt.Errorf("cut %s: %w", path, err)
	}
	return nil
}
