package machine

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/arch"
	"forkd.dev/forkd/internal/vmm/bus"
	"forkd.dev/forkd/internal/vmm/memory"
	"forkd.dev/forkd/internal/vmm/virtio"
	"forkd.dev/forkd/internal/vmmwire"
)

const kindSerial = vmmwire.DeviceSerial

// Device is what a machine does with a device that the guest reaches by a bus.
type Device interface {
	bus.Handler
	// Pause returns once the device stands still; Resume lets it go on. Both may be
	// repeated; a device begins paused.
	Pause()
	Resume()
	// AppendState and LoadState carry its state; the device is paused.
	AppendState(b []byte) []byte
	LoadState(b []byte) error
}

// attached is a device of a machine. release frees what it has outside of the bus.
type attached struct {
	Device
	kind    vmmwire.DeviceKind
	release func()
}

// addLines makes doorbells and interrupt lines of all windows, for whatever devices come.
func (m *Machine) addLines() error {
	for i := range m.cfg.MMIO {
		address, gsi := arch.MMIOWindow(i)
		doorbell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return fmt.Errorf("make doorbell %d: %w", i, err)
		}
		interrupt, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			_ = unix.Close(doorbell)
			return fmt.Errorf("make interrupt %d: %w", i, err)
		}
		m.lines = append(m.lines, line{doorbell: os.NewFile(uintptr(doorbell), "doorbell"), interrupt: interrupt})
		if err := m.vm.BindWrite(doorbell, uint64(address)+virtio.RegQueueNotify); err != nil {
			return err
		}
		if err := m.vm.BindInterrupt(interrupt, gsi); err != nil {
			return err
		}
	}
	return nil
}

// addSerialLine makes the interrupt line of COM1.
func (m *Machine) addSerialLine() error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("make interrupt of the serial port: %w", err)
	}
	m.serial = &line{interrupt: fd}
	return m.vm.BindInterrupt(fd, arch.SerialIRQ)
}

// SerialLine is the interrupt line of COM1. It stays the machine's.
func (m *Machine) SerialLine() virtio.Interrupter { return m.serial }

func (l line) close() {
	if l.doorbell != nil {
		l.doorbell.Close()
	}
	_ = unix.Close(l.interrupt)
}

// one is what adds one to an eventfd.
var one = []byte{1, 0, 0, 0, 0, 0, 0, 0}

// Raise implements virtio.Interrupter.
func (l line) Raise() {
	// EAGAIN means that the line is raised already, billions of times.
	_, _ = unix.Write(l.interrupt, one)
}

// guestMemory is the memory as virtio devices want it.
type guestMemory struct{ *memory.Space }

// Slice implements virtio.GuestMemory.
func (g guestMemory) Slice(address, n uint64) ([]byte, error) {
	return g.Space.Slice(memory.Address(address), n)
}

// windows counts the virtio devices.
func (m *Machine) windows() (n int) {
	for _, d := range m.devices {
		if d.kind != kindSerial {
			n++
		}
	}
	return n
}

// AddVirtio puts a virtio device on the next free window. The machine is blank. release is
// called when the machine closes.
func (m *Machine) AddVirtio(kind vmmwire.DeviceKind, name string, d virtio.Device, release func()) (*virtio.Transport, error) {
	i := m.windows()
	if m.filled || i >= len(m.lines) {
		return nil, errdefs.New(errdefs.ErrInvalid, "add device %s: the machine has %d windows, or is not blank", name, len(m.lines))
	}
	t, err := virtio.NewTransport(virtio.Config{
		Name: name, Memory: guestMemory{m.mem}, Interrupt: m.lines[i], Doorbell: m.lines[i].doorbell,
	}, d)
	if err != nil {
		return nil, err
	}
	address, _ := arch.MMIOWindow(i)
	if err := m.mmio.Add(uint64(address), virtio.WindowSize, t); err != nil {
		return nil, err
	}
	m.devices = append(m.devices, attached{t, kind, release})
	m.helpers.Go(func() { _ = t.Serve() }) // ends when the doorbell is closed
	return t, nil
}

// AddSerial puts the device on the ports of COM1. The machine is blank.
func (m *Machine) AddSerial(d Device, release func()) error {
	if m.filled {
		return errdefs.New(errdefs.ErrInvalid, "add serial port: the machine is not blank")
	}
	if err := m.ports.Add(arch.SerialPort, arch.SerialPorts, d); err != nil {
		return err
	}
	m.devices = append(m.devices, attached{d, kindSerial, release})
	return nil
}

// Interrupt sets the level of an interrupt line that no virtio window has.
func (m *Machine) Interrupt(gsi uint32, level bool) {
	var v uint32
	if level {
		v = 1
	}
	_ = m.vm.SetInterrupt(gsi, v)
}

// power is the reset and sleep register.
type power struct{ m *Machine }

// Read implements bus.Handler.
func (power) Read(_ uint64, p []byte) { clear(p) }

// Write implements bus.Handler.
func (d power) Write(offset uint64, p []byte) {
	switch {
	case offset == 0 && p[0] == arch.ResetValue:
		d.m.endWith(End{Reason: "the guest asked for a reset", Guest: true})
	case offset == arch.SleepPort-arch.ResetPort && p[0]&arch.SleepEnable != 0:
		d.m.endWith(End{Reason: "the guest powered itself off", Guest: true})
	}
}
