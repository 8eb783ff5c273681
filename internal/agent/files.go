package agent

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// readLimited reads a file of the guest, at most limit bytes of it.
func readLimited(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: not a regular file", path)
	}
	return io.ReadAll(io.LimitReader(f, limit))
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
