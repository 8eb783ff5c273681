package forkd

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api/rest"
)

// CheckpointRequest says how to make a checkpoint, RolledBack what a rollback did,
// AutoCheckpoint is a schedule.
type (
	CheckpointRequest = rest.CreateCheckpoint
	RolledBack        = rest.RolledBack
	AutoCheckpoint    = rest.AutoCheckpoint
)

// Checkpoint captures a running sandbox so that it can return there. It returns when
// the sandbox runs again, while the checkpoint is still "writing", unless req.Sync.
func (c *Client) Checkpoint(ctx context.Context, ref string, req CheckpointRequest) (BranchResult, error) {
	return fetch[BranchResult](ctx, c, http.MethodPost, path("v1", "sandboxes", ref, "checkpoints"), req)
}

// Checkpoints lists the checkpoints of a sandbox, oldest first.
func (c *Client) Checkpoints(ctx context.Context, ref string) ([]Snapshot, error) {
	return fetch[[]Snapshot](ctx, c, http.MethodGet, path("v1", "sandboxes", ref, "checkpoints"), nil)
}

// Rollback returns a sandbox to a checkpoint, by id, unique prefix or label; "" is
// the latest. Calls under way in the sandbox end with ErrConflict. If it fails, the
// sandbox goes on as it is.
func (c *Client) Rollback(ctx context.Context, ref, checkpoint string) (RolledBack, error) {
	return fetch[RolledBack](ctx, c, http.MethodPost, path("v1", "sandboxes", ref, "rollback"), rest.Rollback{Checkpoint: checkpoint})
}

// SetAutoCheckpoint sets the schedule of a sandbox's automatic checkpoints; Every
// "off" ends it.
func (c *Client) SetAutoCheckpoint(ctx context.Context, ref string, a AutoCheckpoint) (Sandbox, error) {
	return fetch[Sandbox](ctx, c, http.MethodPut, path("v1", "sandboxes", ref, "auto-checkpoint"), a)
}
