package forkd

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api/rest"
)

// BranchRequest says how to capture a running sandbox; BranchResult is the snapshot
// and what it cost.
type (
	BranchRequest = rest.BranchSandbox
	BranchResult  = rest.Branch
)

// Branch captures a running sandbox into a new snapshot; the sandbox goes on. With
// Wait pointing to false it returns as soon as that runs again: the snapshot then is
// "writing", and "ready" or "failed" later.
func (c *Client) Branch(ctx context.Context, ref string, req BranchRequest) (BranchResult, error) {
	return fetch[BranchResult](ctx, c, http.MethodPost, path("v1", "sandboxes", ref, "branch"), req)
}

// Bool returns a pointer to b, for optional fields.
func Bool(b bool) *bool { return &b }
