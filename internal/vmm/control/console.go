package control

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices/console"
	"forkd.dev/forkd/internal/vmmwire"
)

// addConsole makes the console with the agent's port and adds it to the machine. Who connects to
// the listening socket that came with it is the host's end of the port, the last one wins.
func (s *Server) addConsole(dev vmmwire.Device, files *Files) error {
	if len(dev.Files) != 1 {
		return errdefs.New(errdefs.ErrInvalid, "a console needs one listening socket, not %d files", len(dev.Files))
	}
	fd, err := files.Take(dev.Files[0])
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("listen for the agent's connection: %w", err)
	}
	listener := os.NewFile(uintptr(fd), "agent")
	d, err := console.New(vmmwire.AgentPort)
	if err == nil {
		release := func() {
			_ = listener.Close()
			d.Close()
		}
		_, err = s.cfg.Machine.AddVirtio(dev.Kind, "console", d, release)
	}
	if err != nil {
		_ = listener.Close()
		return err
	}
	go connect(d, listener)
	return nil
}

// connect gives the port each connection that comes, until the listener is closed.
func connect(d *console.Device, listener *os.File) {
	raw, err := listener.SyscallConn()
	if err != nil {
		return
	}
	for {
		fd := -1
		var failed error
		err := raw.Read(func(l uintptr) bool {
			fd, _, failed = unix.Accept4(int(l), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			return !errors.Is(failed, syscall.EAGAIN)
		})
		switch {
		case err != nil:
			return
		case errors.Is(failed, unix.EINTR), errors.Is(failed, unix.ECONNABORTED):
			continue
		case failed != nil:
			return
		}
		// A connection that cannot be used is closed, which tells its other side.
		_ = d.Connect(0, os.NewFile(uintptr(fd), "agent connection"))
	}
}
