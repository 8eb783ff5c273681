package confine

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Config says how to confine the process.
type Config struct {
	UID  int // of this machine alone; 0: keep (not root)
	Root int // descriptor of an empty directory that becomes the root; 0: keep (not root)
	// Limits of resources, set for good.
	Files, FileBytes, Processes uint64
}

// Rights takes everything away from the process but system calls, and returns what could
// not be, in words. It comes as early as possible: what must be opened by path is open.
func Rights(c Config) (lost []string, err error) {
	if err := limits(c); err != nil {
		return nil, err
	}
	if c.Root == 0 {
		lost = append(lost, "empty root (needs root)")
	} else if err := errors.Join(unix.Fchdir(c.Root), unix.Chroot(".")); err != nil {
		return nil, fmt.Errorf("enter empty root: %w", err)
	}
	if c.UID == 0 {
		lost = append(lost, "own uid per machine (needs root)")
	} else if err := dropUID(c.UID); err != nil {
		return nil, fmt.Errorf("become uid %d: %w", c.UID, err)
	}
	return lost, nil
}

// Filter sets no_new_privs and installs the system call filter on all threads, and returns
// what could not be applied. It comes last: threads inherit the filter, and what is
// only done once needs no place in it.
func Filter() (lost []string, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The filter takes the flag along to the other threads.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("set no_new_privs: %w", err)
	}
	if reason := restrictFiles(); reason != "" {
		lost = append(lost, reason)
	}
	return lost, install(processRules(), syncThreads)
}

// dropUID changes ids on all threads (package syscall sees to that) and loses all
// capabilities with them.
func dropUID(uid int) error {
	if err := syscall.Setgroups(nil); err != nil {
		return err
	}
	if err := syscall.Setresgid(uid, uid, uid); err != nil {
		return err
	}
	return syscall.Setresuid(uid, uid, uid)
}

func limits(c Config) error {
	for _, l := range []struct {
		which int
		value uint64
		name  string
	}{
		{unix.RLIMIT_CORE, 0, "core size"},
		{unix.RLIMIT_NOFILE, c.Files, "open files"},
		{unix.RLIMIT_FSIZE, c.FileBytes, "file size"},
		{unix.RLIMIT_NPROC, c.Processes, "processes"},
		{unix.RLIMIT_MEMLOCK, 0, "locked memory"},
	} {
		if l.value == 0 && l.which != unix.RLIMIT_CORE && l.which != unix.RLIMIT_MEMLOCK {
			continue
		}
		// The raw call: that of package syscall would remember to undo it at exec.
		if err := unix.Prlimit(0, l.which, &unix.Rlimit{Cur: l.value, Max: l.value}, nil); err != nil {
			return fmt.Errorf("limit %s to %d: %w", l.name, l.value, err)
		}
	}
	return nil
}
