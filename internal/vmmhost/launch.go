package vmmhost

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmmwire"
)

// Launch says how to start a process. The files stay the caller's.
type Launch struct {
	Program string
	Process vmmwire.Process
	Control *os.File // listening socket of packets
	KVM     *os.File // /dev/kvm, opened for reading and writing
	Root    *os.File // empty directory; nil if Process.UID is 0
	Log     *os.File
}

// namespaces are those that a process of root gets of its own: without interfaces, other
// processes, or anything shared. They cost more than the whole rest of a start, the
// network most; the system call filter leaves no way to use any.
const namespaces = syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS

// Start starts a process. The caller waits for it.
func Start(l Launch) (*exec.Cmd, error) {
	cmd := exec.Command(l.Program, l.Process.Args()...)
	cmd.Dir = "/"
	cmd.Env = l.Process.Env()
	cmd.Stdout, cmd.Stderr = l.Log, l.Log
	cmd.ExtraFiles = []*os.File{l.Control, l.KVM}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if l.Process.UID != 0 {
		cmd.ExtraFiles = append(cmd.ExtraFiles, l.Root)
		cmd.SysProcAttr.Cloneflags = namespaces
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w: %w", filepath.Base(l.Program), err, errdefs.ErrUnavailable)
	}
	return cmd, nil
}
