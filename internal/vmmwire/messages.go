package vmmwire

import (
	"time"
)

// Version is the version of the protocol; a client ends a connection whose Hello
// has another.
const Version = 1

// Limits of the protocol.
const (
	MaxMessage = 128 << 10
	MaxFiles   = 64
	// MaxRanges bounds the plan of a machine's memory. A chain that needs more is
	// flattened by the daemon before.
	MaxRanges     = 4096
	MaxDevices    = 16
	MaxCPUs       = 8
	MaxMemoryMiB  = 1 << 20
	maxText       = 4096
	maxCmdline    = 2047 // what the boot protocol of x86 allows everywhere
	maxDeviceArgs = 1024
	maxID         = 64
)

// Kind is the kind of a message.
type Kind byte

// The kinds. Requests come from the client, the others from the VMM.
const (
	KindHello Kind = 1 + iota
	KindBoot
	KindRestore
	KindPause
	KindResume
	KindCaptureBegin
	KindCaptureEnd
	KindCaptureAbort
	KindStored
	KindRollback
	KindStats
	KindQuit
	KindDone
	KindCaptured
	KindStatsReply
	KindFailed
	KindEnded
	kindEnd
)

// State is what the machine of a process is doing.
type State byte

// The states of a VMM process.
const (
	StateBlank   State = 1 + iota // prepared, without a machine
	StatePaused                   // the machine stands still
	StateRunning                  // the vCPUs run
	StateEnded                    // the guest ended; the process ends with its connection
)

// Hello is the first message on every connection.
type Hello struct {
	Version uint64
	Build   string // of the VMM program
	State   State
	PID     int
	ID      string   // of the machine; "" while blank
	Lost    []string // what of the confinement could not be applied, in words
}

// Shape is the size of a machine. A blank process was prepared for one shape.
type Shape struct {
	CPUs      int
	MemoryMiB int
}

// Device describes one virtual device. Devices keep their order, which is part of
// the machine's address map: a restore must name the same kinds in the same order.
type Device struct {
	Kind  DeviceKind
	Files []int // positions among the packet's descriptors
	// Args is the device's own configuration, checked by the device.
	Args []byte
}

// DeviceKind tells devices apart.
type DeviceKind byte

// The kinds of devices.
const (
	DeviceSerial  DeviceKind = 1 + iota // COM1; file: where its output goes
	DeviceConsole                       // virtio console, the agent channel; file: listening stream socket
	DeviceBlock                         // virtio block; files: its layers, the writable one last
	DeviceRNG
	DeviceNet     // file: packet socket of frames
	DeviceBalloon // with free page reporting
	deviceKindEnd
)

// AgentPort is the name of the port of the console that the guest agent opens.
const AgentPort = "org.forkd.agent"

// Boot starts a machine from a kernel.
type Boot struct {
	ID      string
	Shape   Shape
	Kernel  int // descriptor of a vmlinux (ELF) or bzImage
	Initrd  int // descriptor, or NoFile
	Cmdline string
	Devices []Device
	Paused  bool // do not run yet
	// LowestCPU offers the guest only what every x86-64-v2 processor has, so that its
	// snapshots go to other hosts.
	LowestCPU bool
}

// NoFile is the position of a descriptor that is not there.
const NoFile = -1

// Range says where the content of a run of guest pages lies. Pages count in the
// order of the memory's bytes, which has no hole below 4 GiB.
type Range struct {
	Page   uint64
	Count  uint64
	File   int    // descriptor, or NoFile: zero
	Offset uint64 // in File, a multiple of the page size
}

// Memory is the plan of a machine's memory. Ranges ascend and do not overlap; pages in
// none are zero.
type Memory struct {
	Ranges []Range
}

// Restore makes a machine from a captured state.
type Restore struct {
	ID      string
	Shape   Shape
	Memory  Memory
	State   int // descriptor of the state file
	Devices []Device
	Run     bool // resume at once
	// Generation, if not all zero, is the new VM generation id.
	Generation [16]byte
}

// Rollback puts the machine back to a captured state, in place. The machine is
// paused afterwards unless Run is set.
type Rollback struct {
	Memory  Memory
	State   int
	Devices []Device // the files of devices that change theirs; may be empty
	Run     bool
	// ToLast: the target is what the last stored capture, restore or rollback left, so
	// that only pages written since can differ.
	ToLast bool
	// Generation, if not all zero, is the new VM generation id.
	Generation [16]byte
}

// CaptureBegin starts a capture: memory is copied while the guest runs.
type CaptureBegin struct {
	// Pages and Index are descriptors of writable files. Pages has room for MaxPages
	// pages, and its memory should exist already: fresh memory is what costs most.
	Pages, Index int
	MaxPages     uint64
	// Everything copies all pages that are not zero instead of those that differ
	// from the parent.
	Everything bool
	// NoCopy starts without copying: for small deltas, or a guest that is paused.
	NoCopy bool
}

// CaptureEnd stops the machine, copies what is left, and stores the device state.
//
// The overlay of each block device is sealed; a machine that is to go on needs an empty
// file for each that becomes its new one.
type CaptureEnd struct {
	State int  // descriptor of a writable file, empty
	Run   bool // resume the guest
	// Devices are the block devices with the file of their next overlay, in their order;
	// empty if the machine ends.
	Devices []Device
}

// Captured is the reply to CaptureEnd, and to CaptureBegin with what was copied so far.
type Captured struct {
	Pages       uint64 // in the index
	Runs        uint64 // entries of the index
	CopiedPages uint64 // while paused
	Rounds      uint64 // of copying while the guest ran
	Pause       time.Duration
	StateBytes  uint64
}

// Stats is the reply to a request of KindStats.
type Stats struct {
	State        State
	Exits        uint64
	PrivatePages uint64 // guest pages that differ from the mapped files
	CPU          time.Duration
	Waiting      string // what the guest waits for, "" if nothing
}

// Failed is the reply to a request that failed. Code is one of errdefs.
type Failed struct {
	Code string
	Text string
}

// Ended says why the machine ended. Guest is set if the guest asked for it.
type Ended struct {
	Reason string
	Guest  bool
}
