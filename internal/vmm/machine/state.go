package machine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sort"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/arch"
	"forkd.dev/forkd/internal/vmm/kvm"
	"forkd.dev/forkd/internal/vmm/vmstate"
)

// Registers whose place in the order of restoring matters: the counter comes first, the
// deadline last and after the local APIC, which would clear it.
const (
	msrTSC         = 0x10
	msrTSCDeadline = 0x6e0
)

// saveState reads everything but memory and disks from the parked machine.
func (m *Machine) saveState() (*vmstate.State, error) {
	s := &vmstate.State{MemoryMiB: int(m.cfg.MemoryBytes >> 20), CPUID: kvm.EncodeCPUID(m.cpuid)}
	for _, v := range m.vcpus {
		v.kvm.NotifyPause()
		c, err := m.saveCPU(v.kvm)
		if err != nil {
			return nil, fmt.Errorf("save vCPU %d: %w", v.id, err)
		}
		s.CPUs = append(s.CPUs, c)
	}
	var err error
	if s.TSCkHz, err = m.vcpus[0].kvm.TSCkHz(); err != nil {
		return nil, err
	}
	if s.Clock, err = m.vm.Clock(); err != nil {
		return nil, err
	}
	for i := range kvm.IRQChips {
		chip, err := m.vm.IRQChip(i)
		if err != nil {
			return nil, err
		}
		s.IRQChips = append(s.IRQChips, chip)
	}
	for _, d := range m.devices {
		s.Devices = append(s.Devices, vmstate.Device{Kind: uint32(d.kind), State: d.AppendState(nil)})
	}
	return s, nil
}

func (m *Machine) saveCPU(c *kvm.VCPU) (out vmstate.CPU, err error) {
	// The order of kvm.Item: MP_STATE comes first because reading it settles pending
	// start-up messages, events come last.
	for i := range out.Items {
		if kvm.Item(i) == kvm.ItemEvents {
			msrs, err := c.MSRs(m.msrs)
			if err != nil {
				return out, err
			}
			sort.SliceStable(msrs, func(i, j int) bool { return msrOrder(msrs[i]) < msrOrder(msrs[j]) })
			out.MSRs = kvm.EncodeMSRs(msrs)
		}
		if out.Items[i], err = c.Get(kvm.Item(i), m.xsave); err != nil {
			return out, err
		}
	}
	return out, nil
}

func msrOrder(r kvm.MSR) int {
	switch r.Index {
	case msrTSC:
		return 0
	case msrTSCDeadline:
		return 2
	}
	return 1
}

// restoreOrder is the order of a vCPU's items; MSRs come before the last.
var restoreOrder = [...]kvm.Item{
	kvm.ItemMPState, kvm.ItemRegs, kvm.ItemSregs, kvm.ItemXsave, kvm.ItemXcrs, kvm.ItemDebugRegs, kvm.ItemLAPIC, kvm.ItemEvents,
}

// loadState puts the parked machine into state s.
func (m *Machine) loadState(s *vmstate.State) error {
	if len(s.CPUs) != len(m.vcpus) || uint64(s.MemoryMiB)<<20 != m.cfg.MemoryBytes {
		return errdefs.New(errdefs.ErrInvalid, "state is of a machine with %d CPUs and %d MiB, this one has %d and %d",
			len(s.CPUs), s.MemoryMiB, len(m.vcpus), m.cfg.MemoryBytes>>20)
	}
	if len(s.Devices) != len(m.devices) {
		return errdefs.New(errdefs.ErrInvalid, "state has %d devices, this machine %d", len(s.Devices), len(m.devices))
	}
	if err := m.loadCPUID(s); err != nil {
		return err
	}
	if err := m.vm.SetClock(s.Clock); err != nil {
		return err
	}
	for i, chip := range s.IRQChips {
		if err := m.vm.SetIRQChip(i, chip); err != nil {
			return err
		}
	}
	for i, v := range m.vcpus {
		if err := loadCPU(v.kvm, &s.CPUs[i]); err != nil {
			return fmt.Errorf("load vCPU %d: %w", i, err)
		}
	}
	for i, d := range m.devices {
		if s.Devices[i].Kind != uint32(d.kind) {
			return errdefs.New(errdefs.ErrInvalid, "device %d of the state is of kind %d, this machine's of %d", i, s.Devices[i].Kind, d.kind)
		}
		if err := d.LoadState(s.Devices[i].State); err != nil {
			return fmt.Errorf("load device %d: %w", i, err)
		}
	}
	return nil
}

// loadCPUID gives the vCPUs the CPUID of the state if it is not theirs already.
func (m *Machine) loadCPUID(s *vmstate.State) error {
	if bytes.Equal(s.CPUID, kvm.EncodeCPUID(m.cpuid)) {
		return nil
	}
	if m.filled {
		return errdefs.New(errdefs.ErrIncompatible, "a machine cannot change its processor features")
	}
	template, err := kvm.DecodeCPUID(s.CPUID)
	if err != nil {
		return err
	}
	for i, v := range m.vcpus {
		if err := v.kvm.SetCPUID(arch.ForCPU(template, i)); err != nil {
			return fmt.Errorf("%w: %w", errdefs.ErrIncompatible, err)
		}
	}
	m.cpuid = template
	return nil
}

func loadCPU(c *kvm.VCPU, s *vmstate.CPU) error {
	msrs, err := kvm.DecodeMSRs(s.MSRs)
	if err != nil {
		return err
	}
	for _, item := range restoreOrder {
		if item == kvm.ItemEvents {
			if err := setMSRs(c, msrs); err != nil {
				return err
			}
		}
		if err := c.Set(item, s.Items[item]); err != nil {
			return err
		}
	}
	c.NotifyPause()
	return nil
}

// setMSRs writes registers. One that the host refuses to write is passed over if it has
// the wanted value anyway.
func setMSRs(c *kvm.VCPU, msrs []kvm.MSR) error {
	for len(msrs) > 0 {
		n, err := c.SetMSRs(msrs)
		if err == nil {
			return nil
		}
		if !errors.Is(err, errdefs.ErrIncompatible) {
			return err
		}
		refused := msrs[n]
		now, readErr := c.MSRs([]uint32{refused.Index})
		if readErr != nil || len(now) != 1 || now[0].Data != refused.Data {
			return err
		}
		msrs = msrs[n+1:]
	}
	return nil
}

// writeGeneration stores the id that tells a guest that it is another one now.
func (m *Machine) writeGeneration(id [16]byte) error {
	if id == [16]byte{} {
		return nil
	}
	at, err := m.mem.Slice(arch.GenerationAddress, uint64(len(id)))
	if err != nil {
		return err
	}
	// The first half is one word: a guest that polls it must not see half of it.
	binary.LittleEndian.PutUint64(at[8:], binary.LittleEndian.Uint64(id[8:]))
	binary.LittleEndian.PutUint64(at, binary.LittleEndian.Uint64(id[:]))
	return nil
}
