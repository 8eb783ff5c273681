package control

import (
	"os"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/devices/rng"
	"forkd.dev/forkd/internal/vmm/devices/serial"
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
	case vmmwire.DeviceRNG:
		_, err := s.cfg.Machine.AddVirtio(d.Kind, "entropy", rng.New(), nil)
		return err
	}
	return errdefs.New(errdefs.ErrUnsupported, "this build has no device of kind %d", d.Kind)
}

// consoleRate bounds what a guest can write to the host's disk by printing: a boot with all its
// messages goes through at once.
var consoleRate = devices.Rate{PerSecond: 16 << 10, Burst: 256 << 10}

func addSerial(m *machine.Machine, dev vmmwire.Device, files *Files) error {
	if len(dev.Files) != 1 {
		return errdefs.New(errdefs.ErrInvalid, "a serial port needs one file")
	}
	fd, err := files.Take(dev.Files[0])
	if err != nil {
		return err
	}
	out := os.NewFile(uintptr(fd), "console log")
	d, err := serial.New(serial.Config{Output: out, Interrupt: m.SerialLine(), Clock: devices.NewSystemClock(), Limit: consoleRate})
	if err == nil {
		err = m.AddSerial(d, func() { _ = out.Close() })
	}
	if err != nil {
		_ = out.Close()
	}
	return err
}
