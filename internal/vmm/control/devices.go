package control

import (
	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/machine"
	"forkd.dev/forkd/internal/vmmwire"
)

// addDevice makes a device of a request and adds it to the machine.
func (s *Server) addDevice(d vmmwire.Device, files *Files) error {
	switch d.Kind {
	case vmmwire.DeviceSerial:
		return addSerial(s.cfg.Machine, d, files)
	case vmmwire.DeviceNet:
		return s.addNet(d, files)
	case vmmwire.DeviceBalloon:
		_, err := s.cfg.Machine.AddBalloon()
		return err
	case vmmwire.DeviceConsole:
		return s.addConsole(d, files)
	case vmmwire.DeviceBlock:
		return s.addBlock(d, files)
	}
	return errdefs.New(errdefs.ErrUnsupported, "this build has no device of kind %d", d.Kind)
}

func addSerial(m *machine.Machine, d vmmwire.Device, files *Files) error {
	if len(d.Files) != 1 {
		return errdefs.New(errdefs.ErrInvalid, "a serial port needs one file")
	}
	fd, err := files.Take(d.Files[0])
	if err != nil {
		return err
	}
	release := func() { _ = unix.Close(fd) }
	if err := m.AddSerial(port(fd), release); err != nil {
		release()
		return err
	}
	return nil
}

// port is a serial port that only sends.
type port int

func (p port) Read(offset uint64, b []byte) {
	clear(b)
	if offset == 5 {
		b[0] = 0x60
	}
}

func (p port) Write(offset uint64, b []byte) {
	if offset == 0 {
		_, _ = unix.Write(int(p), b)
	}
}

func (port) Pause()                      {}
func (port) Resume()                     {}
func (port) AppendState(b []byte) []byte { return b }
func (port) LoadState([]byte) error      { return nil }
