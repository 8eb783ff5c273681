package metadata

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// lockDir takes the data directory for this process. The lock ends when the file
// is closed, also by the death of the process; the file itself stays.
func lockDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory %s: %w", dir, classify(err))
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		defer f.Close()
		return nil, errdefs.WithHint(
			errdefs.New(errdefs.ErrConflict, "lock data directory %s: it is used by %s", dir, lockHolder(f)),
			"stop the other forkd serve, or use another --data-dir")
	}
	if err == nil {
		err = errors.Join(f.Truncate(0), writeAt(f, strconv.Itoa(os.Getpid())+"\n"))
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock data directory %s: %w", dir, classify(err))
	}
	return f, nil
}

func writeAt(f *os.File, s string) error {
	_, err := f.WriteAt([]byte(s), 0)
	return err
}

// lockHolder names who holds the lock. The holder may not have written its pid yet.
func lockHolder(f *os.File) string {
	var b [32]byte
	n, _ := f.ReadAt(b[:], 0)
	if pid, err := strconv.Atoi(strings.TrimSpace(string(b[:n]))); err == nil && pid > 0 {
		return fmt.Sprintf("process %d", pid)
	}
	return "another process"
}
