package machine

import (
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/arch"
	"forkd.dev/forkd/internal/vmm/memory"
	"forkd.dev/forkd/internal/vmm/vmstate"
)

// Boot fills the blank machine with a kernel. It is paused. Devices were added before.
func (m *Machine) Boot(b arch.Boot) error {
	if m.filled {
		return errdefs.New(errdefs.ErrConflict, "boot: the machine is not blank")
	}
	b.Memory = m.cfg.MemoryBytes
	b.Firmware = arch.Firmware{CPUs: len(m.vcpus), MMIO: m.windows()}
	for _, d := range m.devices {
		b.Firmware.Serial = b.Firmware.Serial || d.kind == kindSerial
	}
	entry, err := arch.Load(m.mem, b)
	if err != nil {
		return err
	}
	// The other processors wait for the start-up message, as KVM made them.
	if err := entry.SetRegisters(m.vcpus[0].kvm); err != nil {
		return err
	}
	m.filled = true
	return nil
}

// Restore fills the blank machine with a captured one. It is paused. Devices were added
// before, the same in the same order. Sources stay the caller's and may be closed.
func (m *Machine) Restore(plan memory.Plan, state []byte, generation [16]byte) error {
	if m.filled {
		return errdefs.New(errdefs.ErrConflict, "restore: the machine is not blank")
	}
	s, err := vmstate.Decode(state)
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	if err := m.mem.Restore(plan); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	if err := m.loadState(s); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	m.filled = true
	return m.writeGeneration(generation)
}

// Rollback is where to go back to.
type Rollback struct {
	Plan  memory.Plan
	State []byte
	// ToParent: the target is the parent of the next capture (what was restored, rolled
	// back to, or captured and stored last), so that only what was written since differs.
	ToParent   bool
	Generation [16]byte
}

// Rollback puts the machine back to a captured state, in place, and leaves it paused. A
// state that does not fit is refused before anything changes; any later error ends the machine.
func (m *Machine) Rollback(r Rollback) error {
	switch {
	case m.hasEnded():
		return errdefs.New(errdefs.ErrGuest, "roll back: the machine has ended: %s", m.end.Reason)
	case !m.filled || m.capture != nil:
		return errdefs.New(errdefs.ErrConflict, "roll back: the machine is blank or being captured")
	}
	s, err := vmstate.Decode(r.State)
	if err != nil {
		return fmt.Errorf("roll back: %w", err)
	}
	m.Pause()
	changed, err := m.differing(r)
	if err != nil {
		return fmt.Errorf("roll back: %w", err)
	}
	if err := m.rollBack(r, s, changed); err != nil {
		err = fmt.Errorf("roll back: %w", err)
		m.endWith(End{Reason: err.Error()})
		return err
	}
	return m.writeGeneration(r.Generation)
}

// differing lists the pages that may differ from the target.
func (m *Machine) differing(r Rollback) ([]memory.Run, error) {
	if r.ToParent && m.mem.Tracking() {
		written, err := m.mem.Written()
		return memory.Union(m.sinceParent, written), err
	}
	private, err := m.mem.Private()
	if err != nil {
		return nil, err
	}
	return memory.Union(private, m.mem.Differs(r.Plan)), nil
}

func (m *Machine) rollBack(r Rollback, s *vmstate.State, changed []memory.Run) error {
	if err := m.mem.Rollback(r.Plan, changed); err != nil {
		return err
	}
	if m.mem.Tracking() {
		// What was copied back is as the parent has it: it counts as not written.
		if _, err := m.mem.Written(); err != nil {
			return err
		}
		m.sinceParent = nil
	}
	return m.loadState(s)
}
