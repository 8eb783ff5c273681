package forkd

import (
	"context"
	"net/http"
	"net/url"

	"forkd.dev/forkd/api/rest"
)

// TreeNode is a state or a sandbox in the tree, Diff what differs between two states.
type (
	TreeNode    = rest.TreeNode
	DiffRequest = rest.DiffStates
	Diff        = rest.Diff
)

// Tree lists snapshots, checkpoints and living sandboxes, each behind the state it came
// from. With ref only what that comes from and what came from it.
func (c *Client) Tree(ctx context.Context, ref string) ([]TreeNode, error) {
	target := "/v1/tree"
	if ref != "" {
		target += "?ref=" + url.QueryEscape(ref)
	}
	return fetch[[]TreeNode](ctx, c, http.MethodGet, target, nil)
}

// Diff compares two snapshots, checkpoints or running sandboxes, which stay as they
// are; progress may be nil.
func (c *Client) Diff(ctx context.Context, req DiffRequest, progress Progress) (Diff, error) {
	var out Diff
	err := c.lines(ctx, "/v1/diff", req, "", func(raw []byte) error {
		var line rest.DiffLine
		if err := decodeLine(raw, &line); err != nil {
			return err
		}
		if line.Diff != nil {
			out = *line.Diff
		}
		return step(line.Progress, progress, line.Done, streamError(line.Error, line.Code, line.Hint))
	})
	return out, err
}
