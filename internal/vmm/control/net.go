package control

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/devices/nic"
	"forkd.dev/forkd/internal/vmmwire"
)

// addNet makes the network card of a request, with the packet socket that came with it as its cable, and adds
// it to the machine.
func (s *Server) addNet(dev vmmwire.Device, files *Files) error {
	mac, err := vmmwire.ParseNetArgs(dev.Args)
	if err != nil {
		return err
	}
	if len(dev.Files) != 1 {
		return errdefs.New(errdefs.ErrInvalid, "a network card needs one packet socket, not %d files", len(dev.Files))
	}
	d, err := nic.New(nic.Config{MAC: mac, Clock: devices.NewSystemClock()})
	if err != nil {
		return err
	}
	fd, err := files.Take(dev.Files[0])
	if err != nil {
		return err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("connect network card: %w", err)
	}
	cable := os.NewFile(uintptr(fd), "network")
	if _, err := s.cfg.Machine.AddVirtio(dev.Kind, "network", d, d.Close); err != nil {
		_ = cable.Close()
		return err
	}
	return d.Connect(cable)
}
