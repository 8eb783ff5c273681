package kvm

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// VCPU is one virtual processor.
type VCPU struct {
	fd  int
	run []byte // struct kvm_run and what follows
}

// Close unmaps and closes the vCPU.
func (c *VCPU) Close() {
	unmapRun(c.run)
	_ = unix.Close(c.fd)
}

// Item is a piece of state that is saved and restored as bytes.
type Item int

// The items of a vCPU, in the order in which they must be saved; restore has its own.
const (
	ItemMPState Item = iota
	ItemRegs
	ItemSregs
	ItemXsave
	ItemXcrs
	ItemDebugRegs
	ItemLAPIC
	ItemEvents
	itemCount
)

var items = [itemCount]struct {
	name     string
	get, set uintptr
	size     int
}{
	ItemMPState:   {"MP_STATE", getMPState, setMPState, 4},
	ItemRegs:      {"REGS", getRegs, setRegs, 144},
	ItemSregs:     {"SREGS", getSregs, setSregs, 312},
	ItemXsave:     {"XSAVE", getXsave, setXsave, xsaveLen},
	ItemXcrs:      {"XCRS", getXcrs, setXcrs, xcrsLen},
	ItemDebugRegs: {"DEBUGREGS", getDebugRegs, setDebugRegs, debugLen},
	ItemLAPIC:     {"LAPIC", getLAPIC, setLAPIC, lapicLen},
	ItemEvents:    {"VCPU_EVENTS", getVCPUEvents, setVCPUEvents, eventsLen},
}

func (i Item) String() string { return items[i].name }

// Get returns the bytes of an item; xsaveLen is that of [System.XsaveLen].
func (c *VCPU) Get(i Item, xsaveSize int) ([]byte, error) {
	size, request := items[i].size, items[i].get
	if i == ItemXsave && xsaveSize > size {
		size, request = xsaveSize, getXsave2
	}
	b := make([]byte, size)
	return b, ioctlPtr(c.fd, request, &b[0], "KVM_GET_"+items[i].name)
}

// Set restores an item. ErrInvalid: b has not the item's length.
func (c *VCPU) Set(i Item, b []byte) error {
	if len(b) < items[i].size || (len(b) > items[i].size && i != ItemXsave) {
		return errdefs.New(errdefs.ErrInvalid, "set %s: %d bytes, want %d", items[i].name, len(b), items[i].size)
	}
	return ioctlPtr(c.fd, items[i].set, &b[0], "KVM_SET_"+items[i].name)
}

// Regs returns the general registers.
func (c *VCPU) Regs() (r Regs, err error) { return r, ioctlPtr(c.fd, getRegs, &r, "KVM_GET_REGS") }

// SetRegs sets the general registers.
func (c *VCPU) SetRegs(r Regs) error { return ioctlPtr(c.fd, setRegs, &r, "KVM_SET_REGS") }

// Sregs returns segments, tables and control registers.
func (c *VCPU) Sregs() (s Sregs, err error) {
	return s, ioctlPtr(c.fd, getSregs, &s, "KVM_GET_SREGS")
}

// SetSregs sets segments, tables and control registers.
func (c *VCPU) SetSregs(s Sregs) error { return ioctlPtr(c.fd, setSregs, &s, "KVM_SET_SREGS") }

// SetCPUID says what processor the guest sees. It comes before any other state.
func (c *VCPU) SetCPUID(entries []CPUIDEntry) error {
	if len(entries) > maxCPUID {
		return errdefs.New(errdefs.ErrInvalid, "set CPUID: %d entries", len(entries))
	}
	list := &cpuidList{Count: uint32(len(entries))}
	copy(list.Entries[:], entries)
	return ioctlPtr(c.fd, setCPUID2, list, "KVM_SET_CPUID2")
}

// MSRs reads those of the indices that the vCPU has; what it refuses is left out.
func (c *VCPU) MSRs(indices []uint32) ([]MSR, error) {
	out := make([]MSR, 0, len(indices))
	list := &msrList{}
	for len(indices) > 0 {
		n := min(len(indices), maxMSRs)
		list.Count = uint32(n)
		for i, index := range indices[:n] {
			list.Entries[i] = MSR{Index: index}
		}
		got, err := ioctlCount(c.fd, getMSRs, list, "KVM_GET_MSRS")
		if err != nil {
			return nil, err
		}
		out = append(out, list.Entries[:got]...)
		if got < n {
			got++ // the one that was refused
		}
		indices = indices[got:]
	}
	return out, nil
}

// SetMSRs writes registers in their order and returns how many it wrote.
// ErrIncompatible: the host refuses the next one.
func (c *VCPU) SetMSRs(msrs []MSR) (done int, err error) {
	list := &msrList{}
	for done < len(msrs) {
		n := copy(list.Entries[:], msrs[done:])
		list.Count = uint32(n)
		got, err := ioctlCount(c.fd, setMSRs, list, "KVM_SET_MSRS")
		if err != nil {
			return done, err
		}
		done += got
		if got < n {
			return done, errdefs.New(errdefs.ErrIncompatible, "this host refuses MSR %#x = %#x", list.Entries[got].Index, list.Entries[got].Data)
		}
	}
	return done, nil
}

// EncodeMSRs returns the registers as bytes of struct kvm_msr_entry.
func EncodeMSRs(msrs []MSR) []byte {
	b := make([]byte, 0, len(msrs)*msrLen)
	le := binary.LittleEndian
	for _, m := range msrs {
		b = le.AppendUint32(b, m.Index)
		b = le.AppendUint32(b, 0)
		b = le.AppendUint64(b, m.Data)
	}
	return b
}

// DecodeMSRs is the inverse of EncodeMSRs.
func DecodeMSRs(b []byte) ([]MSR, error) {
	if len(b)%msrLen != 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "%d bytes of MSRs", len(b))
	}
	out := make([]MSR, 0, len(b)/msrLen)
	for le := binary.LittleEndian; len(b) > 0; b = b[msrLen:] {
		out = append(out, MSR{Index: le.Uint32(b), Data: le.Uint64(b[8:])})
	}
	return out, nil
}

// EncodeCPUID returns the entries as bytes of struct kvm_cpuid_entry2.
func EncodeCPUID(entries []CPUIDEntry) []byte {
	b := make([]byte, 0, len(entries)*cpuidLen)
	le := binary.LittleEndian
	for _, e := range entries {
		for _, v := range []uint32{e.Function, e.Index, e.Flags, e.EAX, e.EBX, e.ECX, e.EDX, 0, 0, 0} {
			b = le.AppendUint32(b, v)
		}
	}
	return b
}

// DecodeCPUID is the inverse of EncodeCPUID.
func DecodeCPUID(b []byte) ([]CPUIDEntry, error) {
	if len(b)%cpuidLen != 0 || len(b) > maxCPUID*cpuidLen {
		return nil, errdefs.New(errdefs.ErrInvalid, "%d bytes of CPUID", len(b))
	}
	out := make([]CPUIDEntry, 0, len(b)/cpuidLen)
	for le := binary.LittleEndian; len(b) > 0; b = b[cpuidLen:] {
		out = append(out, CPUIDEntry{
			Function: le.Uint32(b), Index: le.Uint32(b[4:]), Flags: le.Uint32(b[8:]),
			EAX: le.Uint32(b[12:]), EBX: le.Uint32(b[16:]), ECX: le.Uint32(b[20:]), EDX: le.Uint32(b[24:]),
		})
	}
	return out, nil
}

// TSCkHz returns the rate of the guest's time stamp counter.
func (c *VCPU) TSCkHz() (uint64, error) {
	khz, err := ioctl(c.fd, getTSCkHz, 0, "KVM_GET_TSC_KHZ")
	if err != nil {
		return 0, err
	}
	return uint64(max(khz, 0)), nil
}

// SetTSCkHz scales the time stamp counter, where the processor can.
func (c *VCPU) SetTSCkHz(khz uint64) error {
	_, err := ioctl(c.fd, setTSCkHz, uintptr(khz), "KVM_SET_TSC_KHZ")
	return err
}

// NotifyPause tells a guest with a paravirtual clock that it was stopped, so that its
// watchdogs do not bark. Guests without one refuse: the error is of no interest.
func (c *VCPU) NotifyPause() { _, _ = ioctl(c.fd, kvmclockCtrl, 0, "KVM_KVMCLOCK_CTRL") }

// Clock returns the bytes of struct kvm_clock_data.
func (m *VM) Clock() ([]byte, error) {
	b := make([]byte, clockLen)
	return b, ioctlPtr(m.fd, getClock, &b[0], "KVM_GET_CLOCK")
}

// SetClock lets the guest's clock go on from what Clock returned.
func (m *VM) SetClock(b []byte) error {
	if len(b) != clockLen {
		return errdefs.New(errdefs.ErrInvalid, "set clock: %d bytes", len(b))
	}
	c := append([]byte(nil), b...)
	clear(c[8:]) // flags, and what belongs to flags
	return ioctlPtr(m.fd, setClock, &c[0], "KVM_SET_CLOCK")
}

// IRQChips is the number of interrupt controllers of a VM.
const IRQChips = 3

// IRQChip returns the state of an interrupt controller: two 8259 and the IOAPIC.
func (m *VM) IRQChip(chip int) ([]byte, error) {
	b := make([]byte, irqChipLen)
	binary.LittleEndian.PutUint32(b, uint32(chip))
	return b, ioctlPtr(m.fd, getIRQChip, &b[0], "KVM_GET_IRQCHIP")
}

// SetIRQChip restores what IRQChip returned for chip.
func (m *VM) SetIRQChip(chip int, b []byte) error {
	if len(b) != irqChipLen || binary.LittleEndian.Uint32(b) != uint32(chip) {
		return errdefs.New(errdefs.ErrInvalid, "set interrupt controller %d: wrong bytes", chip)
	}
	return ioctlPtr(m.fd, setIRQChip, &b[0], "KVM_SET_IRQCHIP")
}

// PortAccess is a guest's access to ports. Data is shared with the kernel: what is
// written there before the next Run is what the guest reads.
type PortAccess struct {
	Port  uint16
	Size  int // of one access: 1, 2 or 4
	Write bool
	Data  []byte // Size times the number of repetitions
}

// Port describes the access of an ExitIO.
func (c *VCPU) Port() (PortAccess, error) {
	le := binary.LittleEndian
	a := PortAccess{
		Port: le.Uint16(c.run[runIOPort:]), Size: int(c.run[runIOSize]), Write: c.run[runIODirection] == ioOut,
	}
	n := uint64(a.Size) * uint64(le.Uint32(c.run[runIOCount:]))
	off := le.Uint64(c.run[runIODataOffset:])
	if off > uint64(len(c.run)) || n > uint64(len(c.run))-off || a.Size == 0 {
		return a, errdefs.New(errdefs.ErrInternal, "port access of %d bytes at %d of the vCPU's state", n, off)
	}
	a.Data = c.run[off : off+n]
	return a, nil
}

// MMIOAccess is a guest's access to an address without memory; see PortAccess for Data.
type MMIOAccess struct {
	Address uint64
	Write   bool
	Data    []byte // 1 to 8 bytes
}

// MMIO describes the access of an ExitMMIO.
func (c *VCPU) MMIO() (MMIOAccess, error) {
	n := binary.LittleEndian.Uint32(c.run[runMMIOLen:])
	if n == 0 || n > 8 {
		return MMIOAccess{}, errdefs.New(errdefs.ErrInternal, "MMIO access of %d bytes", n)
	}
	return MMIOAccess{
		Address: binary.LittleEndian.Uint64(c.run[runMMIOAddress:]),
		Write:   c.run[runMMIOIsWrite] != 0,
		Data:    c.run[runMMIOData : runMMIOData+n],
	}, nil
}

// Details describes an exit that nobody asked for, for the reason of a machine's end.
func (c *VCPU) Details() string {
	le := binary.LittleEndian
	switch reason := c.ExitReason(); reason {
	case ExitShutdown:
		return "triple fault"
	case ExitFailEntry:
		return fmt.Sprintf("the processor refused to run the guest (reason %#x)", le.Uint64(c.run[runUnion:]))
	case ExitInternal:
		return fmt.Sprintf("KVM could not go on (internal error %d)", le.Uint32(c.run[runUnion:]))
	case ExitSystemEvent:
		return fmt.Sprintf("system event %d", le.Uint32(c.run[runUnion:]))
	default:
		return fmt.Sprintf("unexpected exit of KVM (reason %d)", reason)
	}
}
