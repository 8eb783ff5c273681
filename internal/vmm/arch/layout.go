package arch

import "forkd.dev/forkd/internal/vmm/memory"

// Where things lie in guest memory. All below 1 MiB is free again once the kernel has
// copied what it wants, except the tables from GenerationAddress on.
const (
	gdtAddress       memory.Address = 0x500
	pvhInfoAddress   memory.Address = 0x6000
	zeroPageAddress  memory.Address = 0x7000
	stackAddress     memory.Address = 0x8ff0
	pageMapAddress   memory.Address = 0x9000 // PML4, PDPT, four page directories
	cmdlineAddress   memory.Address = 0x20000
	lowMemoryEnd     memory.Address = 0x9fc00
	highMemoryStart  memory.Address = 0x100000
	acpiAddress      memory.Address = 0xe0000
	maxACPIBytes                    = 0x10000
	defaultKernel    memory.Address = 0x1000000
	initrdCeiling    memory.Address = 0x80000000 // what every kernel's boot protocol can address
	localAPICAddress                = 0xfee00000
	ioAPICAddress                   = 0xfec00000

	// GenerationAddress holds 16 bytes that change with every fork.
	GenerationAddress memory.Address = 0xdfff0
	// IRQChipPages are four pages that KVM needs for itself, just below the firmware's place.
	IRQChipPages = 0xfffbc000

	// SerialPort and SerialIRQ are COM1.
	SerialPort  = 0x3f8
	SerialPorts = 8
	SerialIRQ   = 4

	// ResetPort and SleepPort end the machine: a write of ResetValue, or of a value with
	// the enable bit of a hardware-reduced sleep register.
	ResetPort   = 0x600
	ResetValue  = 1
	SleepPort   = 0x601
	sleepStatus = 0x602
	PowerPorts  = 3
	SleepEnable = 0x20
	s5Type      = 5

	// MMIOLength is the window of a virtio-mmio device; window i starts at
	// memory.MMIOStart + i*MMIOLength and interrupts by line FirstMMIOIRQ + i.
	MMIOLength   = 0x1000
	FirstMMIOIRQ = 5
	maxMMIO      = 16
)

// MMIOWindow returns where virtio-mmio device i lies, and its interrupt line.
func MMIOWindow(i int) (memory.Address, uint32) {
	return memory.MMIOStart + memory.Address(i)*MMIOLength, uint32(FirstMMIOIRQ + i)
}
