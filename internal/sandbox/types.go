package sandbox

import (
	"io"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// State is a sandbox's place in its life cycle.
type State string

// The sandbox states of DESIGN 2.
const (
	Creating    State = "creating"
	Running     State = "running"
	Paused      State = "paused"
	Capturing   State = "capturing"
	RollingBack State = "rolling_back"
	Stopping    State = "stopping"
	Failed      State = "failed"
	Lost        State = "lost"
)

// Sandbox is a running (or ended, for 24 h) machine as callers see it.
type Sandbox struct {
	ID             string
	Name           string
	State          State
	Reason         string // of the end or failure
	SnapshotID     string
	SnapshotTag    string // the tag it was asked by, or ""
	Engine         string
	Isolation      engine.Isolation
	Shape          engine.Shape
	Labels         map[string]string
	CreatedAt      time.Time
	EndedAt        time.Time // zero while it lives
	PID            int
	MemoryLimitMiB int
	// CPULimitPercent is of one processor; 0 means no limit, as with PIDsLimit.
	CPULimitPercent int
	PIDsLimit       int
	BranchCount     int
	HoldsSecrets    bool
	Receipt         *agentwire.Receipt
	Timing          Timing
	Auto            AutoCheckpoint // zero if there are none

	owed       string // the verdict its guest waits for, frozen by a capture; or ""
	replaced   bool   // another machine has taken its place
	machineID  string // of its machine, if a rollback made another; or ""
	restoredID string // the checkpoint it was rolled back to last, or ""
}

// machine is the id its machine has.
func (s Sandbox) machine() string {
	if s.machineID != "" {
		return s.machineID
	}
	return s.ID
}

// base is the snapshot or checkpoint its machine was restored from.
func (s Sandbox) base() string {
	if s.restoredID != "" {
		return s.restoredID
	}
	return s.SnapshotID
}

// PoolKind says how far a claimed machine had been prepared.
type PoolKind string

// The kinds of pools, coldest first.
const (
	PoolNone  PoolKind = "none"  // nothing was prepared
	PoolBlank PoolKind = "blank" // restored, never run
	PoolWarm  PoolKind = "warm"  // restored, the whole way to the first answer rehearsed
)

// Timing is how long the steps of a fork took, from the request on.
type Timing struct {
	Pool     PoolKind      // what was claimed
	Start    time.Duration // machine process up and state loaded
	Hello    time.Duration // agent answered
	Identity time.Duration // fork contract fulfilled
	Total    time.Duration
}

// SnapshotStatus is a snapshot's place in its life cycle.
type SnapshotStatus string

// The snapshot states of DESIGN 2.
const (
	SnapshotBuilding SnapshotStatus = "building"
	SnapshotWriting  SnapshotStatus = "writing"
	SnapshotReady    SnapshotStatus = "ready"
	SnapshotFailed   SnapshotStatus = metadata.StatusFailed
	SnapshotStale    SnapshotStatus = "stale"
)

// Snapshot is a captured machine as callers see it.
type Snapshot struct {
	ID            string
	Tags          []string
	Status        SnapshotStatus
	Reason        string // why failed or stale
	ParentID      string
	ImageID       string
	ImageName     string
	Engine        string
	Isolation     engine.Isolation
	Shape         engine.Shape
	Labels        map[string]string
	CreatedAt     time.Time
	Recipe        Recipe
	MemoryBytes   int64 // physical bytes of its own memory layer
	DiskBytes     int64 // physical bytes of its own disk layer
	DeviceBytes   int64 // physical bytes of its device state
	Dir           string
	Pause         time.Duration
	HoldsSecrets  bool
	AgentProtocol int
	// ForkMemory says what forks have of its memory: [MemoryShared] or [MemoryCopied]; ""
	// if the engine is not ours.
	ForkMemory string
	Depth      int // number of ancestors
	Sandboxes  int // that use it now

	UsedBy       []string           // ids of those sandboxes
	BranchedFrom string             // id of the sandbox it was captured from, or "compact:" and a snapshot
	Disk         snapshot.DiskState // how its file systems were left
	ExpiresAt    time.Time          // it goes then, unless it is tagged or in use; zero for most
}

// Recipe is how a snapshot was made, enough to make it again.
type Recipe struct {
	Image string   `json:"image,omitempty"` // image name, for a root
	From  string   `json:"from,omitempty"`  // snapshot it was forked from
	Warm  string   `json:"warm,omitempty"`  // code run in the warm runner
	Exec  []string `json:"exec,omitempty"`  // shell commands run in order

	AllowHosts []string `json:"allow_hosts,omitempty"`
	Files      string   `json:"files,omitempty"` // digest of the archive of copied files
	Start      *Start   `json:"start,omitempty"`
}

// Start is a program that is started in the builder and runs on in every fork.
// What it prints is in [agentwire.StartLog]. The snapshot is made once every
// condition that is set holds. All of it stands in the snapshot's recipe.
type Start struct {
	Command   string // run by /bin/sh -c
	Ready     string // shell command that succeeds once it is ready
	ReadyPort int    // of the guest's loopback, accepts connections once it is ready
	ReadyLog  string // regular expression that a line of its output matches then
	// ReadyTimeout bounds the wait; 0 means 60 seconds.
	ReadyTimeout time.Duration
	Env          map[string]string
	Cwd          string
	User         string
}

// CreateSnapshot asks for a new snapshot. Exactly one of Image and From is set;
// both empty means From py-base.
type CreateSnapshot struct {
	Tag     string
	Replace bool   // move the tag if it is taken
	Image   string // image name or id
	From    string // snapshot reference
	Warm    string
	Exec    []string // each run by /bin/sh -c; a nonzero exit fails the snapshot
	Shape   engine.Shape
	Labels  map[string]string
	// ExecTimeout bounds each command; 0 means 30 minutes.
	ExecTimeout time.Duration
	// Files is a tar archive that is unpacked at the root before anything else; it
	// may be nil.
	Files io.Reader
	Start *Start // after everything else; may be nil
	// AllowHosts are HOST[:PORT] or *.SUFFIX that Exec and Warm may connect to,
	// besides the registries of this host.
	AllowHosts []string
	// WithSecrets agrees to start from a memory that holds secrets.
	WithSecrets bool
}

// Fork asks for n sandboxes of a snapshot.
type Fork struct {
	Snapshot string // reference
	N        int    // 0 means one for each of Children
	Name     string // only with N == 1
	Labels   map[string]string
	Env      map[string]string
	// Secrets are environment too, but never journaled, logged or listed. What has
	// received any holds them in its memory, and so do captures of it.
	Secrets  map[string]string
	Children []ChildInput // nothing, or one for each child
	Reseed   Reseed
	// WithSecrets agrees to copy a memory that holds secrets.
	WithSecrets    bool
	MemoryLimitMiB int
	// CPULimitPercent bounds the processor time, 100 for one processor; 0 means no
	// limit. PIDsLimit bounds the host's processes and threads of each sandbox.
	CPULimitPercent int
	PIDsLimit       int
	// Shape, where nonzero, must equal the snapshot's: a size is fixed at capture.
	Shape engine.Shape
	// Cold boots the children from the disk of the snapshot: its memory is not looked at,
	// so that it may be stale, and what ran in it does not run.
	Cold bool
	// Wait is how long the call may wait for room, in the order of such calls; 0
	// means that what does not fit fails at once.
	Wait time.Duration
	// Partial keeps the children that came up when others failed.
	Partial bool
	// Engine, if set, must be the snapshot's.
	Engine string
	// Progress, if not nil, is told of work that must come first, such as building
	// a built-in snapshot.
	Progress Progress
}

// ForkItem is the outcome for one child.
type ForkItem struct {
	Index   int
	Sandbox Sandbox // zero if Err is set
	Err     error
}

// Image is a built root file system.
type Image struct {
	ID        string
	Name      string
	CreatedAt time.Time
	Source    string // e.g. "debian:bookworm"
	Packages  []string
	DiskMiB   int
	Bytes     int64 // physical
	Digest    string
	Kernel    string // kernel release
	Builtin   bool
	UsedBy    []string // snapshot ids
}

// BuildImage asks for an image of Debian with packages, or of an archive.
type BuildImage struct {
	Name     string
	Replace  bool
	Packages []string
	DiskMiB  int       // 0 means 4096
	Kernel   string    // name of a kernel that was added; "" means Debian's
	Tar      io.Reader // a root file system instead of Debian; may be nil
}

// Kernel is a guest kernel.
type Kernel struct {
	Name      string // "" of Debian's
	Digest    string
	Release   string
	Package   string // of Debian's
	Modules   int
	Bytes     int64
	Default   bool // images get it that ask for none
	CreatedAt time.Time
	UsedBy    []string // image ids
}

// Progress is told what a long operation does; Fraction is negative if unknown.
type Progress func(step string, fraction float64)

// Delete says how to delete a snapshot.
type Delete struct {
	Cascade bool // with its dependents
	Force   bool
}
