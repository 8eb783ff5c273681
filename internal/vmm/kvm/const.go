package kvm

// Requests of linux/kvm.h.
const (
	getAPIVersion       = 0xae00
	createVM            = 0xae01
	getMSRIndexList     = 0xc004ae02
	checkExtension      = 0xae03
	getVCPUMmapSize     = 0xae04
	getSupportedCPUID   = 0xc008ae05
	setTSSAddr          = 0xae47
	setIdentityMapAddr  = 0x4008ae48
	setUserMemoryRegion = 0x4020ae46
	createVCPU          = 0xae41
	createIRQChip       = 0xae60
	irqLine             = 0x4008ae61
	getIRQChip          = 0xc208ae62
	setIRQChip          = 0x8208ae63
	irqFD               = 0x4020ae76
	ioEventFD           = 0x4040ae79
	setClock            = 0x4030ae7b
	getClock            = 0x8030ae7c
	run                 = 0xae80
	getRegs             = 0x8090ae81
	setRegs             = 0x4090ae82
	getSregs            = 0x8138ae83
	setSregs            = 0x4138ae84
	getMSRs             = 0xc008ae88
	setMSRs             = 0x4008ae89
	getLAPIC            = 0x8400ae8e
	setLAPIC            = 0x4400ae8f
	setCPUID2           = 0x4008ae90
	getMPState          = 0x8004ae98
	setMPState          = 0x4004ae99
	getVCPUEvents       = 0x8040ae9f
	setVCPUEvents       = 0x4040aea0
	getDebugRegs        = 0x8080aea1
	setDebugRegs        = 0x4080aea2
	setTSCkHz           = 0xaea2
	getTSCkHz           = 0xaea3
	getXsave            = 0x9000aea4
	setXsave            = 0x5000aea5
	getXsave2           = 0x9000aecf
	getXcrs             = 0x8188aea6
	setXcrs             = 0x4188aea7
	kvmclockCtrl        = 0xaead
)

// Capabilities of linux/kvm.h that are asked for.
const (
	CapIRQChip       = 0
	CapUserMemory    = 3
	CapNRMemSlots    = 10
	CapMPState       = 14
	CapIRQFD         = 32
	CapIOEventFD     = 36
	CapAdjustClock   = 39
	CapVCPUEvents    = 41
	CapDebugRegs     = 50
	CapXsave         = 55
	CapXcrs          = 56
	CapTSCControl    = 60
	CapTSCDeadline   = 72
	CapImmediateExit = 136
	CapXsave2        = 208
)

// Why KVM_RUN returned.
const (
	ExitUnknown     = 0
	ExitIO          = 2
	ExitDebug       = 4
	ExitHLT         = 5
	ExitMMIO        = 6
	ExitShutdown    = 8
	ExitFailEntry   = 9
	ExitIntr        = 10
	ExitInternal    = 17
	ExitSystemEvent = 24
)

const (
	apiVersion = 12

	// MPRunnable is the state of a vCPU that runs.
	MPRunnable = 0
	// MPUninitialized is that of one that waits for its start-up message.
	MPUninitialized = 1
	// MPHalted is that of one that executed HLT.
	MPHalted = 3

	// Offsets in struct kvm_run.
	runImmediateExit = 1
	runExitReason    = 8
	runUnion         = 32
	runIODirection   = 32
	runIOSize        = 33
	runIOPort        = 34
	runIOCount       = 36
	runIODataOffset  = 40
	runMMIOAddress   = 32
	runMMIOData      = 40
	runMMIOLen       = 48
	runMMIOIsWrite   = 52
	runMinSize       = 4096

	ioOut = 1

	// Sizes of structs that are handled as bytes.
	clockLen   = 48
	irqChipLen = 520
	lapicLen   = 1024
	eventsLen  = 64
	debugLen   = 128
	xsaveLen   = 4096
	xcrsLen    = 392
	msrLen     = 16
	cpuidLen   = 40
	maxCPUID   = 128
	// maxMSRs is what one KVM_SET_MSRS may carry (MAX_IO_MSRS of the kernel).
	maxMSRs = 256
)
