package rest

// Snapshot is a captured machine. The fields up to Bootable are upstream's
// SnapshotInfo.
type Snapshot struct {
	Tag           string   `json:"tag"` // the first of Tags, or the id if there is none
	Dir           string   `json:"dir"`
	CreatedAtUnix int64    `json:"created_at_unix"`
	BranchedFrom  string   `json:"branched_from,omitempty"` // id of the sandbox, or compact: and a snapshot
	PauseMS       *float64 `json:"pause_ms,omitempty"`
	Warning       string   `json:"warning,omitempty"` // why failed or stale
	Status        string   `json:"status"`
	Bootable      bool     `json:"bootable"` // it can be forked here and now

	ID           string            `json:"id"`
	Tags         []string          `json:"tags"`
	ParentID     string            `json:"parent_id,omitempty"`
	ImageID      string            `json:"image_id,omitempty"`
	Image        string            `json:"image,omitempty"`
	Engine       string            `json:"engine"`
	Isolation    string            `json:"isolation"`
	CPUs         int               `json:"cpus"`
	MemoryMiB    int               `json:"memory_mib"`
	DiskMiB      int               `json:"disk_mib"`
	Labels       map[string]string `json:"labels"`
	Recipe       Recipe            `json:"recipe"`
	MemoryBytes  int64             `json:"memory_bytes"` // physical, of its own layer
	DiskBytes    int64             `json:"disk_bytes"`   // physical, of its own layer
	HoldsSecrets bool              `json:"holds_secrets"`
	Protocol     int               `json:"agent_protocol"`
	ChainDepth   int               `json:"chain_depth"`               // number of ancestors
	Sandboxes    int               `json:"sandboxes"`                 // that use it now
	Disk         string            `json:"disk,omitempty"`            // synced, or journal: file systems as after a loss of power
	ExpiresUnix  *int64            `json:"expires_at_unix,omitempty"` // it goes then, unless it gets another tag or is in use
	ForkMemory   string            `json:"fork_memory,omitempty"`     // what forks have of its memory: shared copy-on-write, or full copy
}

// Recipe is how a snapshot was made, enough to make it again.
type Recipe struct {
	Image string   `json:"image,omitempty"`
	From  string   `json:"from,omitempty"`
	Warm  string   `json:"warm,omitempty"`
	Exec  []string `json:"exec,omitempty"`

	AllowHosts []string `json:"allow_hosts,omitempty"`
	Files      string   `json:"files,omitempty"` // SHA-256 of the archive of copied files
	Start      *Start   `json:"start,omitempty"`
}

// Start is a program that is started before the capture and runs on in every fork.
// The snapshot is made once every condition that is set holds. It is recorded in
// the snapshot's recipe, its environment too. A command that ends with 0 has left
// behind what becomes ready; any other end fails the snapshot.
type Start struct {
	Command      string            `json:"command"`                      // run by /bin/sh -c
	Ready        string            `json:"ready,omitempty"`              // shell command that succeeds once it is ready
	ReadyPort    int               `json:"ready_port,omitempty"`         // of the guest's loopback, that accepts connections then
	ReadyLog     string            `json:"ready_log,omitempty"`          // regular expression that a line of its output matches then
	ReadyTimeout float64           `json:"ready_timeout_secs,omitempty"` // 60 if 0
	Env          map[string]string `json:"env,omitempty"`                // of command and ready
	Cwd          string            `json:"cwd,omitempty"`
	User         string            `json:"user,omitempty"`
}

// SnapshotDetail is a snapshot with its place in the tree: upstream's
// SnapshotInfoDetail and all of Snapshot.
type SnapshotDetail struct {
	Snapshot
	MemoryLogicalBytes  int64    `json:"memory_logical_bytes"`
	MemoryPhysicalBytes int64    `json:"memory_physical_bytes"`
	VMStateBytes        int64    `json:"vmstate_bytes"`
	ParentTag           string   `json:"parent_tag,omitempty"`
	Dependents          []string `json:"dependents"` // direct ones, by tag or id
	Ancestors           []string `json:"ancestors"`  // root first, by tag or id
	DiskLogicalBytes    int64    `json:"disk_logical_bytes"`
	ChainBytes          int64    `json:"chain_bytes"` // physical, of it and all its ancestors
	UsedBy              []string `json:"used_by"`     // ids of sandboxes
}

// CreateSnapshot is the body of POST /v1/snapshots. At most one of Image and From
// is set; neither means from py-base. With files to copy, the body is a tar
// archive instead: its first entry, request.json, is this object, and the others
// are unpacked at the root of the guest, owned by root.
type CreateSnapshot struct {
	Tag         string            `json:"tag"`
	Replace     bool              `json:"replace,omitempty"` // move the tag if it is taken
	Image       string            `json:"image,omitempty"`
	From        string            `json:"from,omitempty"`
	Warm        string            `json:"warm,omitempty"`              // run in the warm runner, whose state is captured
	Exec        []string          `json:"exec,omitempty"`              // shell commands, in order, all must succeed
	ExecTimeout float64           `json:"exec_timeout_secs,omitempty"` // each; 1800 if 0
	AllowHosts  []string          `json:"allow_hosts,omitempty"`       // HOST[:PORT] or *.SUFFIX that exec and warm may connect to, besides the host's registries
	Start       *Start            `json:"start,omitempty"`
	WithSecrets bool              `json:"with_secrets,omitempty"` // start from a memory that holds secrets
	CPUs        int               `json:"cpus,omitempty"`
	MemoryMiB   int               `json:"memory_mib,omitempty"`
	DiskMiB     int               `json:"disk_mib,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`

	// Kernel, Rootfs and Tap are upstream's and refused: paths of the host are not
	// taken from a client.
	Kernel string `json:"kernel,omitempty"`
	Rootfs string `json:"rootfs,omitempty"`
	Tap    string `json:"tap,omitempty"`
}

// SnapshotLine is one line of a streamed snapshot creation. Progress is set, or
// Done is true, the line is the last one, and Snapshot or Error is set.
type SnapshotLine struct {
	Progress *Progress `json:"progress,omitempty"`
	Done     bool      `json:"done,omitempty"`
	Snapshot *Snapshot `json:"snapshot,omitempty"`
	Error    string    `json:"error,omitempty"`
	Code     string    `json:"code,omitempty"`
	Hint     string    `json:"hint,omitempty"`
}

// SetTag is the body of PUT /v1/tags/{tag}.
type SetTag struct {
	Snapshot    string `json:"snapshot"`
	Replace     bool   `json:"replace,omitempty"`
	WithSecrets bool   `json:"with_secrets,omitempty"` // name a memory that holds secrets
}
