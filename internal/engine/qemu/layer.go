package qemu

import (
	"context"
	"fmt"
	"os"

	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
)

// layerChunk is how many bytes are compared with the parent at a time.
const layerChunk = 1 << 20

// writeLayer writes the copied pages that differ from the parent.
func (c *capture) writeLayer(ctx context.Context, path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create memory layer: %w", err)
	}
	defer f.Close()
	w, err := layerfmt.NewWriter(f, layerfmt.Header{Units: (c.ram.End - c.ram.Start) / linux.PageSize, Parent: c.parent.Snapshot})
	if err != nil {
		return err
	}
	rest := c.arena
	old := make([]byte, layerChunk)
	for _, r := range c.runs {
		for page := r.Start; page < r.Start+r.Count; {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(layerChunk, (r.Start+r.Count-page)*linux.PageSize)
			if err := c.view.Read(old[:n], page); err != nil {
				return err
			}
			if err := memimage.PutChanged(w, page, rest[:n], old[:n]); err != nil {
				return err
			}
			rest = rest[n:]
			page += n / linux.PageSize
		}
	}
	return w.Close()
}
