package vmstate

import (
	"errors"

	"forkd.dev/forkd/internal/errdefs"
)

// Format is the name of this format in the list of a snapshot's artifacts.
const Format = "forkd-vmstate-1"

// Limits of the format.
const (
	MaxBytes      = 16 << 20
	MaxCPUs       = 8
	MaxDevices    = 16
	maxDevice     = 4 << 20
	maxItem       = 64 << 10 // extended processor state grows with its features
	maxMSRs       = 1024
	maxCPUID      = 256
	maxMemoryMiB  = 1 << 20
	msrLen        = 16
	cpuidLen      = 40
	irqChips      = 3
	irqChipLen    = 520
	clockLen      = 48
	machineLen    = 24
	deviceKindLen = 4
)

// What is wrong with a file that is no state this build can read.
var (
	ErrMagic    = errdefs.As(errdefs.ErrCorrupt, errors.New("not the state of a forkd machine"))
	ErrSize     = errdefs.As(errdefs.ErrCorrupt, errors.New("machine state is truncated or has a wrong size"))
	ErrChecksum = errdefs.As(errdefs.ErrCorrupt, errors.New("checksum of machine state does not match"))
	// ErrContent: the checksum matches but the content contradicts itself.
	ErrContent = errdefs.As(errdefs.ErrCorrupt, errors.New("machine state contradicts itself"))
	ErrVersion = errdefs.As(errdefs.ErrIncompatible, errors.New("version of machine state is not supported"))
)

// Items is the number of byte-wise pieces of a vCPU's state; kvm.Item indexes them.
const Items = 8

// State is the state of a machine.
type State struct {
	MemoryMiB int
	TSCkHz    uint64   // rate of the time stamp counter; 0: unknown
	CPUID     []byte   // entries of struct kvm_cpuid_entry2, the same for all vCPUs but for APIC ids
	Clock     []byte   // struct kvm_clock_data
	IRQChips  [][]byte // struct kvm_irqchip: two 8259, IOAPIC
	CPUs      []CPU
	Devices   []Device
}

// CPU is the state of one vCPU.
type CPU struct {
	Items [Items][]byte
	MSRs  []byte // struct kvm_msr_entry each, in the order in which they are restored
}

// Device is the state of one device as the device wrote it.
type Device struct {
	Kind  uint32
	State []byte
}
