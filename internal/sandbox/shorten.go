package sandbox

import (
	"context"
	"fmt"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/store/snapshot"
)

// Captures of captures make chains, and each link costs every fork and every capture
// something: files to open, tables to merge, disks to stack. So a capture that would
// be the last of a long chain is merged with its youngest ancestors before it is
// published, while its source runs again. Published snapshots are never touched: those
// ancestors stay as they are, the new one only does not need them. What ends the
// daemon meanwhile leaves a staging directory, which the next start removes.

// maxDepth is how many ancestors a capture has at most.
const maxDepth = 24

// shortenBytesPerSecond is how fast a chain is merged beside the work of sandboxes.
const shortenBytesPerSecond = 128 << 20

// labelMadeFrom names the snapshot that one came from, if its layers lie on an older one,
// or on none.
const labelMadeFrom = "forkd.made-from"

// shorten merges the capture with its youngest ancestors if it has too many. What fails
// is logged: the capture is published as it is.
func (t *taking) shorten(ctx context.Context, m *snapshot.Manifest) {
	c, ok := t.s.cfg.Engine.(engine.Compactor)
	if !ok || len(t.parent.chain) <= maxDepth {
		return
	}
	// It can wait for another time, the end of the daemon cannot.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(t.s.closing, cancel)()
	if err := t.merge(ctx, c, m); err != nil && ctx.Err() == nil {
		t.s.cfg.Log("merge the layers of %s with those below: %v", t.id, err)
	}
}

func (t *taking) merge(ctx context.Context, c engine.Compactor, m *snapshot.Manifest) error {
	release, err := t.s.cfg.Store.Lease(t.parent.id, "merge "+t.id)
	if err != nil {
		return err
	}
	defer release()
	chain := t.layered()
	sizes := make([]int64, 0, len(chain)-1)
	for _, st := range chain[1:] { // the root is large and stays
		sizes = append(sizes, t.s.chainBytes([]engine.State{st}))
	}
	keep := 1 + engine.MergeFrom(sizes, maxDepth/2)
	for i, st := range chain[:len(chain)-1] {
		// Whose recipe starts a program stays among the ancestors, which tell of it.
		if a, err := t.s.cfg.Store.Get(st.ID); err == nil && a.Recipe.Start != nil {
			keep = max(keep, i+1)
		}
	}
	if keep == len(chain)-1 {
		return nil
	}
	if err := t.s.checkSpace("merge layers", t.s.chainBytes(chain[keep:])); err != nil {
		return err
	}
	artifacts, err := c.Compact(ctx, engine.Compaction{Chain: chain, Keep: keep, Dir: t.staging.Dir(), BytesPerSecond: shortenBytesPerSecond})
	if err != nil {
		return fmt.Errorf("merge %d layers: %w", len(chain)-keep, err)
	}
	m.ParentID, m.Labels = chain[keep-1].ID, withLabels(m.Labels, map[string]string{labelMadeFrom: t.parent.id})
	t.exchange(m, artifacts)
	return nil
}

// layered is the chain of what was captured.
func (t *taking) layered() []engine.State {
	return append(t.parent.chain[:len(t.parent.chain):len(t.parent.chain)],
		engine.State{ID: t.id, Dir: t.staging.Dir(), Artifacts: t.result.Artifacts})
}

// exchange takes merged artifacts in place of what was captured.
func (t *taking) exchange(m *snapshot.Manifest, artifacts []engine.Artifact) {
	m.Artifacts, t.result.LayerBytes = nil, 0
	for _, a := range artifacts {
		m.Artifacts = append(m.Artifacts, snapshot.Artifact{Artifact: a})
		t.result.LayerBytes += a.Bytes
	}
}
