package memimage

import (
	"context"
	"fmt"
	"os"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
)

// Empty returns a sealed memory file of zeros, for a boot.
func Empty(memoryMiB int) (*os.File, error) {
	f, err := linux.MemFile(FileName, int64(memoryMiB)<<20)
	if err != nil {
		return nil, err
	}
	if err := linux.SealImmutable(f); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// buildImage merges the memory layers of chain into one sealed memory file.
func buildImage(ctx context.Context, chain []engine.State, memoryMiB int) (*os.File, error) {
	layers, err := OpenLayers(chain, int64(memoryMiB)<<20)
	if err != nil {
		return nil, err
	}
	defer layers.Close()
	f, err := linux.MemFile(FileName, int64(memoryMiB)<<20)
	if err != nil {
		return nil, err
	}
	if err := fill(ctx, f, layers); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("build memory image of %s: %w", chain[len(chain)-1].ID, err)
	}
	if err := linux.SealImmutable(f); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// fill copies what the layers hold into f; zeros stay holes.
func fill(ctx context.Context, f *os.File, layers Layers) error {
	ranges, err := layerfmt.Plan(layers.Readers)
	if err != nil {
		return err
	}
	unit := int64(layers.Readers[0].Header().UnitSize)
	buf := make([]byte, 1<<20)
	for _, r := range ranges {
		if r.Layer == layerfmt.ZeroLayer {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		for done := int64(0); done < int64(r.Count)*unit; {
			n := min(int64(len(buf)), int64(r.Count)*unit-done)
			if _, err := layers.Files[r.Layer].ReadAt(buf[:n], r.Offset+done); err != nil {
				return fmt.Errorf("read layer %d at %d: %w", r.Layer, r.Offset+done, err)
			}
			if _, err := f.WriteAt(buf[:n], int64(r.Unit)*unit+done); err != nil {
				return err
			}
			done += n
		}
	}
	return nil
}
