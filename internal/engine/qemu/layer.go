package qemu

import (
	"context"
	"fmt"
	"os"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
)

// memoryView reads the memory of a snapshot: from its resident image if that is
// at hand, else from its layers, else (no snapshot) zeros.
type memoryView struct {
	resident *os.File // owned by the residents
	release  func()   // gives it back; nil without a snapshot
	layers   layerChain
	ranges   []layerfmt.Range
}

func (v *memoryView) close() {
	if v.release != nil {
		v.release()
		v.release = nil
	}
	v.layers.close()
}

// parentView opens the memory of the last state of chain for reading.
func (m *Machine) parentView(chain []engine.State) (v memoryView, err error) {
	if len(chain) == 0 {
		return v, nil
	}
	if v.resident, v.release = m.d.residents.peek(chain[len(chain)-1].ID); v.resident != nil {
		return v, nil
	}
	if v.layers, err = openLayers(chain, int64(m.rec.Shape.MemoryMiB)<<20); err != nil {
		v.close()
		return v, err
	}
	if v.ranges, err = layerfmt.Plan(v.layers.readers); err != nil {
		v.close()
	}
	return v, err
}

// read fills b with the memory from page on.
func (v *memoryView) read(b []byte, page uint64) error {
	if v.resident != nil {
		if _, err := v.resident.ReadAt(b, int64(page)*linux.PageSize); err != nil {
			return fmt.Errorf("read parent memory at page %d: %w", page, err)
		}
		return nil
	}
	if v.ranges == nil {
		clear(b)
		return nil
	}
	for len(b) > 0 {
		r := rangeOf(v.ranges, page)
		n := min(uint64(len(b)), (r.Unit+r.Count-page)*linux.PageSize)
		if r.Layer == layerfmt.ZeroLayer {
			clear(b[:n])
		} else if _, err := v.layers.files[r.Layer].ReadAt(b[:n], r.Offset+int64(page-r.Unit)*linux.PageSize); err != nil {
			return fmt.Errorf("read parent memory at page %d: %w", page, err)
		}
		b = b[n:]
		page += n / linux.PageSize
	}
	return nil
}

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
			if err := c.view.read(old[:n], page); err != nil {
				return err
			}
			if err := putChanged(w, page, rest[:n], old[:n]); err != nil {
				return err
			}
			rest = rest[n:]
			page += n / linux.PageSize
		}
	}
	return w.Close()
}

// putChanged writes the pages of now that differ from old.
func putChanged(w *layerfmt.Writer, page uint64, now, old []byte) error {
	for len(now) > 0 {
		if string(now[:linux.PageSize]) != string(old[:linux.PageSize]) {
			if err := w.Put(page, now[:linux.PageSize]); err != nil {
				return err
			}
		}
		now, old, page = now[linux.PageSize:], old[linux.PageSize:], page+1
	}
	return nil
}
