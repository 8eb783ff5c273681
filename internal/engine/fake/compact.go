package fake

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layerfmt"
)

var _ engine.Compactor = (*Driver)(nil)

// Compact writes the last state of a chain on top of those that stay.
func (d *Driver) Compact(ctx context.Context, k engine.Compaction) ([]engine.Artifact, error) {
	chain, dir := k.Chain, k.Dir
	last := chain[len(chain)-1]
	if err := d.fault(OpWrite, last.ID); err != nil {
		return nil, fmt.Errorf("compact %s: %w", last.ID, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("compact %s: %w", last.ID, err)
	}
	shape, err := shapeOf(last)
	if err != nil {
		return nil, fmt.Errorf("compact %s: %w", last.ID, err)
	}
	now, err := readChain(chain, shape)
	if err != nil {
		return nil, fmt.Errorf("compact %s: %w", last.ID, err)
	}
	parentID, below := "", newContent(time.Time{})
	if k.Keep > 0 {
		parentID = chain[k.Keep-1].ID
		if below, err = readChain(chain[:k.Keep], shape); err != nil {
			return nil, fmt.Errorf("compact %s: %w", last.ID, err)
		}
	}
	if dir == last.Dir {
		if err := os.Remove(filepath.Join(dir, memoryArtifact)); err != nil {
			return nil, fmt.Errorf("compact %s: %w", last.ID, err)
		}
	}
	if _, err := writeMemory(filepath.Join(dir, memoryArtifact), parentID, shape, now, below); err != nil {
		return nil, err
	}
	if err := writeSealed(filepath.Join(dir, diskArtifact), now.Disk); err != nil {
		return nil, err
	}
	if err := writeSealed(filepath.Join(dir, deviceArtifact), now.Device); err != nil {
		return nil, err
	}
	return listArtifacts(dir)
}

// shapeOf finds the memory size in a state's layer.
func shapeOf(s engine.State) (engine.Shape, error) {
	f, err := openArtifact(s, "memory")
	if err != nil {
		return engine.Shape{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return engine.Shape{}, err
	}
	r, err := layerfmt.Open(f, st.Size())
	if err != nil {
		return engine.Shape{}, err
	}
	return engine.Shape{MemoryMiB: int(r.Header().LogicalBytes() >> 20)}, nil
}
