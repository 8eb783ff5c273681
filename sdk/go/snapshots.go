package forkd

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api/rest"
)

// DeleteMode says what else goes with a deleted snapshot.
type DeleteMode string

// The modes of DeleteSnapshot.
const (
	DeleteAlone   DeleteMode = ""        // refused if others depend on it
	DeleteCascade DeleteMode = "cascade" // with its dependents
	DeleteForce   DeleteMode = "force"   // even if others depend on it
)

// TagMode says what to do about a taken tag.
type TagMode bool

// The modes of TagSnapshot.
const (
	TagNew     TagMode = false // a taken tag is a conflict
	TagReplace TagMode = true  // a taken tag is moved
)

// CreateSnapshot makes a snapshot; progress may be nil.
func (c *Client) CreateSnapshot(ctx context.Context, req SnapshotRequest, progress Progress) (Snapshot, error) {
	return c.createSnapshot(ctx, req, progress)
}

// createSnapshot sends a request, or the archive that carries one.
func (c *Client) createSnapshot(ctx context.Context, req any, progress Progress) (Snapshot, error) {
	var out Snapshot
	err := c.lines(ctx, "/v1/snapshots", req, "", func(raw []byte) error {
		var line rest.SnapshotLine
		if err := decodeLine(raw, &line); err != nil {
			return err
		}
		if line.Snapshot != nil {
			out = *line.Snapshot
		}
		return step(line.Progress, progress, line.Done, streamError(line.Error, line.Code, line.Hint))
	})
	return out, err
}

// step handles one line of a stream that ends in one object.
func step(p *rest.Progress, progress Progress, done bool, err error) error {
	if done && err == nil {
		return errStop
	}
	if p != nil && progress != nil {
		progress(p.Step, p.Fraction)
	}
	return err
}

// Snapshots lists all snapshots.
func (c *Client) Snapshots(ctx context.Context) ([]Snapshot, error) {
	return fetch[[]Snapshot](ctx, c, http.MethodGet, "/v1/snapshots", nil)
}

// Snapshot returns one snapshot with its place in the tree.
func (c *Client) Snapshot(ctx context.Context, ref string) (SnapshotDetail, error) {
	return fetch[SnapshotDetail](ctx, c, http.MethodGet, path("v1", "snapshots", ref, "info"), nil)
}

// DeleteSnapshot deletes a snapshot and all its tags.
func (c *Client) DeleteSnapshot(ctx context.Context, ref string, mode DeleteMode) error {
	target := path("v1", "snapshots", ref)
	if mode != DeleteAlone {
		target += "?" + string(mode) + "=true"
	}
	return c.do(ctx, http.MethodDelete, target, nil)
}

// TagSnapshot gives a snapshot a tag.
func (c *Client) TagSnapshot(ctx context.Context, ref, tag string, mode TagMode) error {
	return c.do(ctx, http.MethodPut, path("v1", "tags", tag), rest.SetTag{Snapshot: ref, Replace: bool(mode)})
}

// GiveTag gives a snapshot a tag, with all that can be said about it.
func (c *Client) GiveTag(ctx context.Context, tag string, req TagRequest) error {
	return c.do(ctx, http.MethodPut, path("v1", "tags", tag), req)
}

// Untag removes a tag; its snapshot stays.
func (c *Client) Untag(ctx context.Context, tag string) error {
	return c.do(ctx, http.MethodDelete, path("v1", "tags", tag), nil)
}
