package kvm

// Regs is struct kvm_regs.
type Regs struct {
	RAX, RBX, RCX, RDX, RSI, RDI, RSP, RBP uint64
	R8, R9, R10, R11, R12, R13, R14, R15   uint64
	RIP, RFLAGS                            uint64
}

// Segment is struct kvm_segment.
type Segment struct {
	Base                         uint64
	Limit                        uint32
	Selector                     uint16
	Type, Present, DPL, DB, S, L uint8
	G, AVL, Unusable, padding    uint8
}

// Table is struct kvm_dtable.
type Table struct {
	Base    uint64
	Limit   uint16
	padding [3]uint16
}

// Sregs is struct kvm_sregs.
type Sregs struct {
	CS, DS, ES, FS, GS, SS, TR, LDT Segment
	GDT, IDT                        Table
	CR0, CR2, CR3, CR4, CR8         uint64
	EFER, APICBase                  uint64
	InterruptBitmap                 [4]uint64
}

// CPUIDEntry is struct kvm_cpuid_entry2.
type CPUIDEntry struct {
	Function, Index, Flags uint32
	EAX, EBX, ECX, EDX     uint32
	padding                [3]uint32
}

// MSR is struct kvm_msr_entry.
type MSR struct {
	Index    uint32
	reserved uint32
	Data     uint64
}

// memoryRegion is struct kvm_userspace_memory_region.
type memoryRegion struct {
	Slot, Flags                       uint32
	GuestAddress, Size, UserspaceAddr uint64
}

// irqFDArg is struct kvm_irqfd.
type irqFDArg struct {
	FD, GSI, Flags, ResampleFD uint32
	padding                    [16]byte
}

// ioEventFDArg is struct kvm_ioeventfd.
type ioEventFDArg struct {
	Match, Address uint64
	Len            uint32
	FD             int32
	Flags          uint32
	padding        [36]byte
}

// msrList is struct kvm_msrs with room for a full batch.
type msrList struct {
	Count   uint32
	padding uint32
	Entries [maxMSRs]MSR
}

// indexList is struct kvm_msr_list with room for more registers than the kernel knows.
type indexList struct {
	Count   uint32
	Indices [1024]uint32
}

// cpuidList is struct kvm_cpuid2.
type cpuidList struct {
	Count   uint32
	padding uint32
	Entries [maxCPUID]CPUIDEntry
}
