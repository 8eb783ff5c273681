package linux

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// MakeNode makes a device node or named pipe called name in the directory dir.
// mode has the type bits of stat(2). It needs root for devices.
func MakeNode(dir *os.File, name string, mode, major, minor uint32) error {
	if err := unix.Mknodat(int(dir.Fd()), name, mode, int(unix.Mkdev(major, minor))); err != nil {
		return fmt.Errorf("make node %s: %w", name, classify(err))
	}
	return nil
}

// SetAttribute sets an extended attribute of an open file.
func SetAttribute(f *os.File, name string, value []byte) error {
	if err := unix.Fsetxattr(int(f.Fd()), name, value, 0); err != nil {
		return fmt.Errorf("set attribute %s: %w", name, classify(err))
	}
	return nil
}
