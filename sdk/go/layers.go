package forkd

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api/rest"
)

// The bodies of the calls that manage stored snapshots.
type (
	CompactRequest = rest.CompactSnapshot
	VerifyRequest  = rest.Verify
	VerifyResult   = rest.VerifyResult
	Verified       = rest.Verified
	DiskUsage      = rest.DiskUsage
	PruneRequest   = rest.Prune
	PruneResult    = rest.PruneResult
)

// CompactSnapshot makes a snapshot that equals ref and needs no ancestor; progress
// may be nil.
func (c *Client) CompactSnapshot(ctx context.Context, ref string, req CompactRequest, progress Progress) (Snapshot, error) {
	return c.makeSnapshot(ctx, path("v1", "snapshots", ref, "compact"), req, progress)
}

// RebuildSnapshot makes a snapshot again from its recipe. The new one has its tags;
// the old one goes unless something uses it. progress may be nil.
func (c *Client) RebuildSnapshot(ctx context.Context, ref string, progress Progress) (Snapshot, error) {
	return c.makeSnapshot(ctx, path("v1", "snapshots", ref, "rebuild"), nil, progress)
}

func (c *Client) makeSnapshot(ctx context.Context, target string, req any, progress Progress) (Snapshot, error) {
	var out Snapshot
	err := c.lines(ctx, target, req, "", func(raw []byte) error {
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

// Verify reads stored files again. That some are damaged is a result, not an error.
// progress may be nil.
func (c *Client) Verify(ctx context.Context, req VerifyRequest, progress Progress) (VerifyResult, error) {
	var out VerifyResult
	err := c.lines(ctx, "/v1/verify", req, "", func(raw []byte) error {
		var line rest.VerifyLine
		if err := decodeLine(raw, &line); err != nil {
			return err
		}
		if line.Result != nil {
			out = *line.Result
		}
		return step(line.Progress, progress, line.Done, streamError(line.Error, line.Code, line.Hint))
	})
	return out, err
}

// DiskUsage tells what everything takes on disk and in memory.
func (c *Client) DiskUsage(ctx context.Context) (DiskUsage, error) {
	return fetch[DiskUsage](ctx, c, http.MethodGet, "/v1/df", nil)
}

// Prune deletes the snapshots that fulfil all that req says.
func (c *Client) Prune(ctx context.Context, req PruneRequest) (PruneResult, error) {
	return fetch[PruneResult](ctx, c, http.MethodPost, "/v1/prune", req)
}

// SnapshotUse is one snapshot's part of the disk.
type SnapshotUse = rest.SnapshotUse
