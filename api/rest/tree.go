package rest

// TreeNode is one entry of GET /v1/tree: a state, or a sandbox that lives on from one.
// The entries come in the order of a walk, each behind its parent.
type TreeNode struct {
	ID            string            `json:"id"`
	Kind          string            `json:"kind"`                // snapshot, checkpoint or sandbox
	ParentID      string            `json:"parent_id,omitempty"` // the state it came from last
	Depth         int               `json:"depth"`
	Name          string            `json:"name,omitempty"` // of a sandbox, tags of a snapshot, label of a checkpoint
	State         string            `json:"state"`
	Of            string            `json:"of,omitempty"`   // the sandbox that a checkpoint belongs to or a branch came from
	Auto          bool              `json:"auto,omitempty"` // a schedule made it
	Labels        map[string]string `json:"labels"`
	CreatedAtUnix int64             `json:"created_at_unix"`
}

// DiffStates is the body of POST /v1/diff. Each side is a snapshot, a checkpoint or a
// running sandbox, which is captured first and goes on.
type DiffStates struct {
	A       string   `json:"a"`
	B       string   `json:"b"`
	Patch   bool     `json:"patch,omitempty"`   // with a unified diff of text files
	Exclude []string `json:"exclude,omitempty"` // directories to leave out, besides /proc, /sys, /dev and /run
}

// Diff is what differs between two states.
type Diff struct {
	A                DiffSide      `json:"a"`
	B                DiffSide      `json:"b"`
	Changes          []FileChange  `json:"changes"`   // by path
	Truncated        bool          `json:"truncated"` // there are more
	ProcessesAdded   []DiffProcess `json:"processes_added"`
	ProcessesRemoved []DiffProcess `json:"processes_removed"`
	Patch            string        `json:"patch,omitempty"`
	PatchSkipped     int           `json:"patch_skipped,omitempty"` // files that are no text, or too large for the patch
	Warnings         []string      `json:"warnings,omitempty"`
	DurationMS       float64       `json:"duration_ms"`
}

// DiffSide is one of two states that were compared.
type DiffSide struct {
	SnapshotID         string `json:"snapshot_id"`
	Files              int    `json:"files"`
	Processes          int    `json:"processes"`
	MemoryTotalKiB     int64  `json:"memory_total_kib"` // as its kernel counts
	MemoryAvailableKiB int64  `json:"memory_available_kib"`
}

// FileChange is a file that differs.
type FileChange struct {
	Path       string   `json:"path"`
	PathBase64 []byte   `json:"path_base64,omitempty"` // if Path is no text
	Kind       string   `json:"kind"`                  // added, removed or changed
	Type       string   `json:"type"`                  // file, dir, link or other
	What       []string `json:"what,omitempty"`        // of a changed one: type, content, mode, owner, target
	SizeA      int64    `json:"size_a"`
	SizeB      int64    `json:"size_b"`
}

// DiffProcess is a process that only one side has.
type DiffProcess struct {
	PID     int    `json:"pid"`
	Name    string `json:"name"`
	Command string `json:"command"`
	RSSKiB  int64  `json:"rss_kib"`
}

// DiffLine is one line of a streamed diff. The last has Done, and Diff or Error.
type DiffLine struct {
	Progress *Progress `json:"progress,omitempty"`
	Done     bool      `json:"done,omitempty"`
	Diff     *Diff     `json:"diff,omitempty"`
	Error    string    `json:"error,omitempty"`
	Code     string    `json:"code,omitempty"`
	Hint     string    `json:"hint,omitempty"`
}
