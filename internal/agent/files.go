package agent

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
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
func writeInPlace(path, content string, mode os.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, mode)
	if os.IsNotExist(err) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE, mode)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(content), 0); err != nil {
		return err
	}
	if err := f.Truncate(int64(len(content))); err != nil {
		return err
	}
	return f.Close()
}
