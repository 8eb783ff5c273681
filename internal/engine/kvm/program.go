package kvm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/programs"
)

// unpack writes program to dir under a name made of its digest and returns its path. What is
// there already is left alone: a running process may execute it.
func unpack(dir string, program []byte) (string, error) {
	const digits = 16 // tell builds apart; the content is ours
	digest := programs.Digest(program)
	path := filepath.Join(dir, "forkd-vmm-"+digest[len("sha256-"):][:digits])
	if st, err := os.Stat(path); err == nil && st.Size() == int64(len(program)) {
		return path, nil
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("unpack forkd-vmm: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("unpack forkd-vmm: %w", err)
	}
	f, err := os.CreateTemp(dir, ".forkd-vmm-")
	if err != nil {
		return "", fmt.Errorf("unpack forkd-vmm: %w", err)
	}
	_, err = f.Write(program)
	if err == nil {
		err = f.Chmod(0o755)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return "", fmt.Errorf("unpack forkd-vmm: %w", err)
	}
	return path, nil
}
