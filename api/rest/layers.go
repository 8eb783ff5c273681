package rest

// CompactSnapshot is the body of POST /v1/snapshots/{ref}/compact.
type CompactSnapshot struct {
	To      string `json:"to"`                // tag of the result
	Replace bool   `json:"replace,omitempty"` // move the tag if it is taken
	// WithSecrets agrees to name a memory that holds secrets.
	WithSecrets bool `json:"with_secrets,omitempty"`
}

// Verify is the body of POST /v1/verify.
type Verify struct {
	Snapshot string `json:"snapshot,omitempty"` // with its ancestors and its image; everything if absent
	Repair   bool   `json:"repair,omitempty"`   // mark as failed what is damaged, and what was made from it
}

// Verified is what was found about one snapshot or image.
type Verified struct {
	Kind    string `json:"kind"` // snapshot or image
	ID      string `json:"id"`
	Name    string `json:"name,omitempty"`
	Bytes   int64  `json:"bytes"`
	OK      bool   `json:"ok"`
	Error   string `json:"error,omitempty"`   // what is damaged
	Marked  bool   `json:"marked,omitempty"`  // it was marked as failed, for itself or for what it needs
	Rebuild string `json:"rebuild,omitempty"` // the command that makes it again
}

// VerifyResult is the outcome of a verification.
type VerifyResult struct {
	Checked []Verified `json:"checked"`
	Damaged int        `json:"damaged"`
}

// VerifyLine is one line of a streamed verification. Progress is set, or Done is
// true, the line is the last one, and Result or Error is set.
type VerifyLine struct {
	Progress *Progress     `json:"progress,omitempty"`
	Done     bool          `json:"done,omitempty"`
	Result   *VerifyResult `json:"result,omitempty"`
	Error    string        `json:"error,omitempty"`
	Code     string        `json:"code,omitempty"`
	Hint     string        `json:"hint,omitempty"`
}

// DiskUsage is the answer of GET /v1/df.
type DiskUsage struct {
	Snapshots []SnapshotUse `json:"snapshots"` // oldest first
	Images    []ImageUse    `json:"images"`
	Resident  []Resident    `json:"resident"` // memory images that are kept for forks
	Pools     []Pool        `json:"pools"`

	SnapshotBytes int64 `json:"snapshot_bytes"`
	ImageBytes    int64 `json:"image_bytes"`
	SandboxBytes  int64 `json:"sandbox_bytes"` // writable disks of machines
	ResidentBytes int64 `json:"resident_bytes"`
	OccupiedBytes int64 `json:"occupied_bytes"` // memory of all machines and what is resident
	FreeBytes     int64 `json:"free_bytes"`     // of the data directory's file system
	TotalBytes    int64 `json:"total_bytes"`
	MinFreeBytes  int64 `json:"min_free_bytes"` // kept free
}

// SnapshotUse is one snapshot's part of the disk.
type SnapshotUse struct {
	ID            string   `json:"id"`
	Tags          []string `json:"tags"`
	Status        string   `json:"status"`
	ParentID      string   `json:"parent_id,omitempty"`
	OwnBytes      int64    `json:"own_bytes"`      // goes with it
	SharedBytes   int64    `json:"shared_bytes"`   // of its ancestors
	LogicalBytes  int64    `json:"logical_bytes"`  // memory and disk as a guest sees them
	ResidentBytes int64    `json:"resident_bytes"` // of memory, while it is in use
	Dependents    int      `json:"dependents"`
	Sandboxes     int      `json:"sandboxes"`
	Prepared      int      `json:"prepared"` // machines made ahead of forks
}

// ImageUse is one image's part of the disk.
type ImageUse struct {
	ID     string   `json:"id"`
	Name   string   `json:"name"`
	Bytes  int64    `json:"bytes"`
	UsedBy []string `json:"used_by"` // snapshot ids
}

// Resident is the memory image of one snapshot.
type Resident struct {
	SnapshotID string `json:"snapshot_id"`
	Bytes      int64  `json:"bytes"`
	Machines   int    `json:"machines"` // that map it
}

// Prune is the body of POST /v1/prune: delete the snapshots that fulfil all that is
// set. At least one of OlderSecs, Labels and Keep is.
type Prune struct {
	OlderSecs float64           `json:"older_secs,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"` // "" stands for any value
	Keep      *int              `json:"keep,omitempty"`   // leave the youngest of what matches
	DryRun    bool              `json:"dry_run,omitempty"`
}

// Pruned is one snapshot that was deleted, or matched and stayed.
type Pruned struct {
	ID    string   `json:"id"`
	Tags  []string `json:"tags"`
	Bytes int64    `json:"bytes"`
	Kept  string   `json:"kept,omitempty"` // why it stays
}

// PruneResult is the outcome of a prune.
type PruneResult struct {
	Snapshots  []Pruned `json:"snapshots"`
	FreedBytes int64    `json:"freed_bytes"`
	DryRun     bool     `json:"dry_run"`
}
