package kvm

import (
	"fmt"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// System is an open /dev/kvm.
type System struct {
	fd      int
	mapSize int // of struct kvm_run with its data page
}

// Open opens /dev/kvm.
func Open() (*System, error) {
	for {
		fd, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			errno, _ := err.(unix.Errno) //nolint:errorlint // x/sys returns it bare
			return nil, fmt.Errorf("open /dev/kvm: %w", classify(errno))
		}
		return FromFD(fd)
	}
}

// FromFD makes a System of a descriptor of /dev/kvm that was opened elsewhere, and
// owns it from then on, also if it fails.
func FromFD(fd int) (_ *System, err error) {
	s := &System{fd: fd}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	v, err := ioctl(fd, getAPIVersion, 0, "KVM_GET_API_VERSION")
	if err != nil {
		return nil, err
	}
	if v != apiVersion {
		return nil, errdefs.New(errdefs.ErrUnsupported, "KVM has API version %d, want %d", v, apiVersion)
	}
	if s.mapSize, err = ioctl(fd, getVCPUMmapSize, 0, "KVM_GET_VCPU_MMAP_SIZE"); err != nil {
		return nil, err
	}
	if s.mapSize < runMinSize || s.mapSize > 1<<20 {
		return nil, errdefs.New(errdefs.ErrUnsupported, "KVM shares %d bytes per vCPU", s.mapSize)
	}
	return s, nil
}

// Close closes the device. VMs go on.
func (s *System) Close() { _ = unix.Close(s.fd) }

// Extension returns what KVM_CHECK_EXTENSION says of a capability: 0 is no.
func (s *System) Extension(capability uintptr) (int, error) {
	return ioctl(s.fd, checkExtension, capability, "KVM_CHECK_EXTENSION")
}

// SupportedCPUID lists what KVM can offer to guests on this host.
func (s *System) SupportedCPUID() ([]CPUIDEntry, error) {
	list := &cpuidList{Count: maxCPUID}
	if err := ioctlPtr(s.fd, getSupportedCPUID, list, "KVM_GET_SUPPORTED_CPUID"); err != nil {
		return nil, err
	}
	return append([]CPUIDEntry(nil), list.Entries[:min(list.Count, maxCPUID)]...), nil
}

// MSRIndices lists the model-specific registers that belong to a guest's state.
func (s *System) MSRIndices() ([]uint32, error) {
	list := &indexList{}
	list.Count = uint32(len(list.Indices))
	if err := ioctlPtr(s.fd, getMSRIndexList, list, "KVM_GET_MSR_INDEX_LIST"); err != nil {
		return nil, err
	}
	return append([]uint32(nil), list.Indices[:min(int(list.Count), len(list.Indices))]...), nil
}

// XsaveLen returns the size of a vCPU's extended state.
func (s *System) XsaveLen() (int, error) {
	n, err := s.Extension(CapXsave2)
	if err != nil {
		return 0, err
	}
	return max(n, xsaveLen), nil
}

// CreateVM makes a VM without memory. It takes time in proportion to the mappings of
// the process: make it before mapping layers.
func (s *System) CreateVM() (*VM, error) {
	fd, err := ioctl(s.fd, createVM, 0, "KVM_CREATE_VM")
	if err != nil {
		return nil, err
	}
	return &VM{fd: fd, mapSize: s.mapSize}, nil
}

// VM is a virtual machine.
type VM struct {
	fd      int
	mapSize int
}

// Close closes the descriptor. The kernel ends the VM with the last vCPU's.
func (m *VM) Close() { _ = unix.Close(m.fd) }

// CreateIRQChip makes the interrupt controllers (two 8259, IOAPIC, and a local APIC for
// each vCPU made later), with reserved pages for processors without unrestricted
// real mode at address, four pages.
func (m *VM) CreateIRQChip(address uint64) error {
	identity := address
	if err := ioctlPtr(m.fd, setIdentityMapAddr, &identity, "KVM_SET_IDENTITY_MAP_ADDR"); err != nil {
		return err
	}
	if _, err := ioctl(m.fd, setTSSAddr, uintptr(address)+0x1000, "KVM_SET_TSS_ADDR"); err != nil {
		return err
	}
	_, err := ioctl(m.fd, createIRQChip, 0, "KVM_CREATE_IRQCHIP")
	return err
}

// CreateVCPU makes the vCPU with that APIC id.
func (m *VM) CreateVCPU(id int) (*VCPU, error) {
	fd, err := ioctl(m.fd, createVCPU, uintptr(id), "KVM_CREATE_VCPU")
	if err != nil {
		return nil, err
	}
	c := &VCPU{fd: fd}
	if c.run, err = mapRun(fd, m.mapSize); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return c, nil
}

// BindInterrupt raises interrupt line gsi, edge-triggered, whenever the event
// descriptor is written to.
func (m *VM) BindInterrupt(eventFD int, gsi uint32) error {
	arg := irqFDArg{FD: uint32(eventFD), GSI: gsi}
	return ioctlPtr(m.fd, irqFD, &arg, "KVM_IRQFD")
}

// BindWrite turns every 4-byte guest write to an MMIO address into an event, without an
// exit. The value is lost.
func (m *VM) BindWrite(eventFD int, address uint64) error {
	arg := ioEventFDArg{Address: address, Len: 4, FD: int32(eventFD)}
	return ioctlPtr(m.fd, ioEventFD, &arg, "KVM_IOEVENTFD")
}

// SetInterrupt sets the level of an interrupt line.
func (m *VM) SetInterrupt(gsi uint32, level uint32) error {
	arg := [2]uint32{gsi, level}
	return ioctlPtr(m.fd, irqLine, &arg, "KVM_IRQ_LINE")
}
