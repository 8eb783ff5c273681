package rest

// BranchSandbox is the body of POST /v1/sandboxes/{ref}/branch. The fields up to
// ParentTag are upstream's BranchSandboxRequest.
type BranchSandbox struct {
	Tag  string `json:"tag,omitempty"`  // made up if absent; what has such a tag goes after 24 h unless it gets another
	Mode string `json:"mode,omitempty"` // full, diff or live; the best the engine has if absent
	// Diff and Live are mode's old spellings. MeasureDiff is mode full that tells, too,
	// what mode diff would have stored. At most one of the four may be set.
	Diff        bool  `json:"diff,omitempty"`
	Live        bool  `json:"live,omitempty"`
	MeasureDiff bool  `json:"measure_diff,omitempty"`
	Wait        *bool `json:"wait,omitempty"` // true if absent; false only in mode live: answer as soon as the sandbox runs again
	// ParentTag, only in mode diff, must be the snapshot that the sandbox was forked from.
	ParentTag string `json:"parent_tag,omitempty"`

	Freeze  *bool             `json:"freeze,omitempty"` // true if absent: user processes stand still around the capture
	Sync    bool              `json:"sync,omitempty"`   // write file systems out before
	Labels  map[string]string `json:"labels,omitempty"`
	Replace bool              `json:"replace,omitempty"` // move the tag if it is taken

	WithSecrets bool `json:"with_secrets,omitempty"` // give a tag to a memory that holds secrets
}

// Branch is the snapshot that a branch made, and what making it cost. DiffMS and
// the fields after it are set in mode diff and by measure_diff.
type Branch struct {
	Snapshot
	StallMS           float64  `json:"stall_ms"` // user processes stood still
	CopiedBytes       int64    `json:"copied_bytes"`
	LayerBytes        int64    `json:"layer_bytes"` // disk space of what was captured; 0 while it is being written
	DiffMS            *float64 `json:"diff_ms,omitempty"`
	DiffPhysicalBytes *int64   `json:"diff_physical_bytes,omitempty"`
	DiffLogicalBytes  *int64   `json:"diff_logical_bytes,omitempty"`
}
