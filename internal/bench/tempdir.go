package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// tempPrefix begins the names of our temporary directories.
const tempPrefix = "forkd-bench-"

// tempDir is a temporary directory, locked for as long as its process lives: one whose
// process was killed is found by the next and removed.
type tempDir struct {
	path string
	lock *os.File // the directory itself
}

// newTempDir makes a directory in parent ("" is the usual place), and removes what
// processes that were killed have left there.
func newTempDir(parent string) (*tempDir, error) {
	if parent == "" {
		parent = os.TempDir()
	}
	sweepTempDirs(parent)
	path, err := os.MkdirTemp(parent, tempPrefix)
	if err != nil {
		return nil, err
	}
	lock, err := lockDir(path)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(path))
	}
	return &tempDir{path: path, lock: lock}, nil
}

func (d *tempDir) remove() error {
	return errors.Join(os.RemoveAll(d.path), d.lock.Close())
}

func lockDir(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// sweepTempDirs removes our directories that no process has locked. What cannot be
// removed, or belongs to another user, stays.
func sweepTempDirs(parent string) {
	found, _ := filepath.Glob(filepath.Join(parent, tempPrefix+"*"))
	for _, path := range found {
		lock, err := lockDir(path)
		if err != nil {
			continue
		}
		info, err := lock.Stat()
		if err == nil && int(info.Sys().(*syscall.Stat_t).Uid) == os.Geteuid() {
			_ = os.RemoveAll(path) // the next one tries again
		}
		_ = lock.Close()
	}
}
