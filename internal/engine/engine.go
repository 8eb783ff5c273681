// Package engine is the contract between forkd and what runs a sandbox.
//
// A [Driver] turns an image into a running [Machine] (Boot), a running machine
// into stored state (Machine.Capture), and stored state into any number of
// machines (Restore). It knows nothing of tags, tokens or requests, makes no
// decisions of policy, and is told every path it may touch. The conformance
// suite in enginetest defines what is correct.
//
// Ownership: every machine has a directory (Spec.Dir) that the caller creates and
// removes; the driver writes only there, into CaptureSpec.Dir, and into its own
// directory (Config of the driver). Everything a machine owns outside of its
// directory has a name derived from its id, so that Reap finds it after a crash.
//
// The capture rule: what a capture stores equals memory, device state and disk at
// one instant, the pause. A page copied before the pause is copied again if it
// was written since. Anything else is a torn snapshot.
package engine

import (
	"context"
	"io"
	"net"
	"time"
)

// Isolation is the kind of boundary around a sandbox.
type Isolation string

// The isolation levels, strongest first.
const (
	IsolationHardware   Isolation = "vm-hardware"
	IsolationEmulated   Isolation = "vm-emulated"
	IsolationUserKernel Isolation = "user-kernel"
)

// Probe is what a driver found out about this host.
type Probe struct {
	Available    bool
	Reason       string // why not, or what it will use, in one sentence
	Remedy       string // what to do if not available
	Version      string // of the program behind the driver, e.g. "QEMU 7.2.22"
	Accelerator  string // "tcg", "kvm", "systrap"
	Isolation    Isolation
	SharesMemory bool // forks share memory with their snapshot copy-on-write
	// Confinement lists what is applied to each machine process; Lost what cannot
	// be here, in words (an ordinary user cannot change uid, for example).
	Confinement []string
	Lost        []string
	// MinMemoryLimitMiB is the smallest Limits.MemoryMiB a machine can live with.
	MinMemoryLimitMiB int
}

// Shape is the size of a machine, fixed in its snapshot.
type Shape struct {
	CPUs      int `json:"cpus"`
	MemoryMiB int `json:"memory_mib"`
	DiskMiB   int `json:"disk_mib"`
}

// Root is an immutable root file system in the forms that exist of it.
type Root struct {
	Disk      string // raw ext4 file system
	Kernel    string // ELF vmlinux
	Initramfs string // with the agent as /init
	// Tree is the same root file system as an EROFS file, for engines that need no disk.
	// It is "" if nobody asked the image store for trees; such an engine then gives a
	// sandbox an empty root, which is enough to show that it works.
	Tree       string
	TreeDigest string // of the file's content
}

// Limits bound the host resources of one machine. Zero means the driver's default.
type Limits struct {
	MemoryMiB  int // of the machine's processes, shared pages included once touched
	PIDs       int
	CPUPercent int // of one processor: 250 is two and a half
}

// Spec is what Boot and Restore have in common.
type Spec struct {
	ID     string // sandbox id
	Dir    string // existing, empty, owned by the machine until Kill or Reap returns
	Shape  Shape
	Root   Root
	Limits Limits
}

// State is one captured link of a chain as it lies in the store.
type State struct {
	ID        string // snapshot id
	Dir       string
	Artifacts []Artifact
}

// Artifact is one file of a captured state. Its Kind and Format are the
// driver's business, except that every file is listed.
type Artifact struct {
	Name   string `json:"name"`   // file name inside State.Dir
	Kind   string `json:"kind"`   // "memory", "disk" or "device"
	Format string `json:"format"` // e.g. "forkd-layer-1", "qcow2", "qemu-xen-7.2"
	Bytes  int64  `json:"bytes"`  // physical size
}

// Compat is what a snapshot needs from a host to be restored.
type Compat struct {
	Engine       string `json:"engine"`
	EngineBuild  string `json:"engine_build"`
	Accelerator  string `json:"accelerator"`
	KernelDigest string `json:"kernel_digest,omitempty"`
	CPU          string `json:"cpu,omitempty"`
	TSCkHz       uint64 `json:"tsc_khz,omitempty"`
}

// Driver runs machines. All methods may be called concurrently.
type Driver interface {
	Name() string
	// Probe looks at the host. It is cheap enough for every start of the daemon.
	Probe(ctx context.Context) Probe
	// Compat describes this host and build; root is the image the state belongs to.
	Compat(root Root) (Compat, error)
	// CheckCompat says with ErrIncompatible why state recorded as c cannot be restored here.
	CheckCompat(c Compat) error
	// Boot starts a machine from its root file system. It returns once the machine
	// runs (its agent may still be starting).
	Boot(ctx context.Context, spec Spec) (Machine, error)
	// Restore makes a machine from the last state of chain (root first). The machine
	// is stopped: the caller dials the agent, then resumes it.
	Restore(ctx context.Context, spec Spec, chain []State) (Machine, error)
	// Adopt takes over a machine that another process of ours started, by what it
	// left in dir. ErrNotFound: it is gone.
	Adopt(ctx context.Context, id, dir string) (Machine, error)
	// Reap ends and removes whatever is left of machine id outside of its
	// directory, whether or not it ever started. It may be repeated.
	Reap(ctx context.Context, id, dir string) error
	// Orphans lists the ids of the machines of this installation that have a
	// process here, adopted or not.
	Orphans(ctx context.Context) ([]string, error)
	// Forget drops what the driver keeps in memory for a snapshot that is being deleted.
	Forget(snapshotID string)
	// Close releases the driver's own resources. Machines go on.
	Close() error
}

// Pooler is implemented by drivers that can prepare processes ahead of a restore.
type Pooler interface {
	// Prepare sees to it that n prepared machines exist for the last state of chain,
	// in the background. newSpec is called for each; n=0 ends them.
	Prepare(chain []State, n int, newSpec func() (Spec, error))
	// Claim hands out a prepared machine with the id of its spec, or nil.
	Claim(snapshotID string) Machine
	// Pooled counts prepared machines of a snapshot.
	Pooled(snapshotID string) int
}

// ColdBooter is implemented by drivers whose states have a disk that a machine can boot
// from.
type ColdBooter interface {
	// BootFrom is Boot with the disk of the last state of chain; its memory and its
	// devices are not looked at. Like one that was booted, the machine has no parent,
	// and a capture of it needs no other state.
	BootFrom(ctx context.Context, spec Spec, chain []State) (Machine, error)
}

// Limiter is implemented by drivers that can limit a machine after it was made: then a
// prepared one serves also who asks for limits.
type Limiter interface {
	// Limit gives machine id the limits that are not zero. If it fails, some may be in
	// force and the machine is of no use to who needs them.
	Limit(ctx context.Context, id string, limits Limits) error
}

// MemoryMeter is implemented by drivers that can tell what they occupy.
type MemoryMeter interface {
	// OccupiedKiB is the host memory of all machines of the driver, prepared ones
	// too, and of what it keeps for snapshots; shared memory counts once. It is
	// cheap enough to be asked before every fork.
	OccupiedKiB() (int64, error)
}

// ResidentKeeper is implemented by drivers that keep memory of snapshots at hand.
type ResidentKeeper interface {
	Residents() []Resident
}

// Resident is the memory of one snapshot, kept so that forks can share it.
type Resident struct {
	SnapshotID string
	Bytes      int64
	Machines   int // that map it now, prepared ones too
}

// StateChecker is implemented by drivers whose artifacts could do harm if somebody
// else made them.
type StateChecker interface {
	// CheckState says with ErrCorrupt why a state that came from elsewhere is refused.
	CheckState(s State, shape Shape) error
}

// Waiter is implemented by machines whose guest can stand still for want of
// something of the host.
type Waiter interface {
	// Waiting says what the guest waits for, or "" if it runs.
	Waiting() string
}

// Compactor is implemented by drivers whose captures store differences.
type Compactor interface {
	// Compact writes the last state of a chain so that it needs fewer others, and
	// returns its artifacts. If it fails, a state in c.Dir is as it was.
	Compact(ctx context.Context, c Compaction) ([]Artifact, error)
}

// Compaction says what to merge.
type Compaction struct {
	Chain []State // root first
	// Keep is how many states of the chain stay below the result; 0: it needs no other.
	Keep int
	Dir  string // empty, or that of the last state, which is replaced
	// BytesPerSecond bounds what is read for it, 0 does not.
	BytesPerSecond int64
}

// Machine is one sandbox's machine. Methods may be called concurrently; Pause,
// Resume, Capture and Kill are serialised by the machine itself.
type Machine interface {
	ID() string
	PID() int
	// DialAgent connects the byte stream to the agent. A new connection replaces an
	// older one; the guest is not told which bytes were lost.
	DialAgent(ctx context.Context) (net.Conn, error)
	// Pause and Resume stop and continue all of the guest. Both may be repeated.
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
	// Capture stores the machine's state as spec says.
	Capture(ctx context.Context, spec CaptureSpec) (CaptureResult, error)
	// Parent is the snapshot that the next capture is a difference to; "" for a booted
	// machine. Forget of that snapshot makes it the one before.
	Parent() string
	// Stored tells a machine that went on after a capture that what was captured is
	// published now as a snapshot: it becomes the machine's parent. Without it the
	// next capture has the same parent as the last and holds everything since.
	Stored(ctx context.Context, snapshotID string) error
	Usage(ctx context.Context) (Usage, error)
	// Kill ends the machine and frees all but its directory. It may be repeated.
	Kill(ctx context.Context) error
	// Done is closed when the machine has ended, for whatever reason; Reason says which.
	Done() <-chan struct{}
	Reason() string
	// Console returns a reader over what the guest's kernel printed so far.
	Console() (io.ReadCloser, error)
}

// After says what a machine does once it is captured.
type After int

// What Capture leaves behind.
const (
	AfterResume After = iota // the source goes on
	AfterEnd                 // the source is ended; its files become the snapshot's
)

// CaptureSpec says what to capture and where to.
type CaptureSpec struct {
	Dir string // existing and empty; receives the artifacts
	// Parent is the chain of the snapshot the machine was restored from or, if one
	// was stored later, of the last that was (root first); empty for a booted
	// machine. Only what differs from it is stored.
	Parent []State
	After  After
	// BeforeStop, if set, is called once, right before the machine stops, when all
	// that a running guest does not hinder is done. Its error ends the capture.
	BeforeStop func(ctx context.Context) error
	// Resumed, if set, is called once for a source that goes on, as soon as it does and
	// all of its state is taken, with what is known by then: Pause and CopiedBytes. What
	// was taken is written after it returns. Its error ends the capture.
	Resumed func(ctx context.Context, res CaptureResult) error
}

// CaptureResult is what a capture stored.
type CaptureResult struct {
	Artifacts   []Artifact
	Pause       time.Duration // wall time the guest was stopped
	CopiedBytes int64         // memory read while stopped
	LayerBytes  int64         // physical bytes of all artifacts
}

// Usage is what a machine consumes on the host.
type Usage struct {
	PSSKiB        int64
	PrivateKiB    int64
	RSSKiB        int64
	CPU           time.Duration
	DiskBytes     int64 // physical bytes of its writable disk
	LastActivity  time.Time
	GuestPagesKiB int64 // guest pages that differ from the mapped image
}
