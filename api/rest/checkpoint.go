package rest

// CreateCheckpoint is the body of POST /v1/sandboxes/{ref}/checkpoints.
type CreateCheckpoint struct {
	Label  string `json:"label,omitempty"`  // free text, by which rollback finds it too
	Sync   bool   `json:"sync,omitempty"`   // answer only when it is written and proven
	Freeze *bool  `json:"freeze,omitempty"` // true if absent: user processes stand still around the capture
}

// Labels of checkpoints.
const (
	LabelText = "forkd.label" // what CreateCheckpoint.Label said
	LabelAuto = "forkd.auto"  // "true": a schedule made it
)

// Rollback is the body of POST /v1/sandboxes/{ref}/rollback.
type Rollback struct {
	Checkpoint string `json:"checkpoint,omitempty"` // id, unique prefix or label of a checkpoint, or a branch of the sandbox; the latest if absent
}

// RolledBack is the outcome of a rollback.
type RolledBack struct {
	Sandbox      Sandbox `json:"sandbox"`
	CheckpointID string  `json:"checkpoint_id"`
	DurationMS   float64 `json:"duration_ms"` // until the sandbox had answered
}

// AutoCheckpoint is the body of PUT /v1/sandboxes/{ref}/auto-checkpoint: the schedule
// of a sandbox's automatic checkpoints. One is made each interval in which the
// sandbox did something.
type AutoCheckpoint struct {
	Every string `json:"every"`          // as in "30s", 1s to 24h; "off" ends it
	Keep  int    `json:"keep,omitempty"` // the newest stay; 20 if absent
}
