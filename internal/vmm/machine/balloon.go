package machine

import (
	"forkd.dev/forkd/internal/vmm/devices/balloon"
	"forkd.dev/forkd/internal/vmm/memory"
	"forkd.dev/forkd/internal/vmmwire"
)

// Drop implements balloon.Dropper.
func (g guestMemory) Drop(address, n uint64) error { return g.Space.Drop(memory.Address(address), n) }

// AddBalloon puts a balloon over the machine's memory on the next free window. The machine is blank.
func (m *Machine) AddBalloon() (*balloon.Device, error) {
	mem := guestMemory{m.mem}
	d, err := balloon.New(balloon.Config{Memory: mem, Dropper: mem})
	if err != nil {
		return nil, err
	}
	if _, err := m.AddVirtio(vmmwire.DeviceBalloon, "balloon", d, nil); err != nil {
		return nil, err
	}
	return d, nil
}
