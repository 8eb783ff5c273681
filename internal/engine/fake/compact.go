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

// Compact writes the last state of chain into dir so that it needs no other.
func (d *Driver) Compact(ctx context.Context, chain []engine.State, dir string) ([]engine.Artifact, error) {
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
	if dir == last.Dir {
		if err := os.Remove(filepath.Join(dir, memoryArtifact)); err != nil {
			return nil, fmt.Errorf("compact %s: %w", last.ID, err)
		}
	}
	if _, err := writeMemory(filepath.Join(dir, memoryArtifact), "", shape, now, newContent(time.Time{})); err != nil {
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
