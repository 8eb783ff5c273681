package memimage

import (
	"fmt"
	"os"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
)

// View reads the memory of a snapshot: from its resident image if that is
// at hand, else from its layers, else (no snapshot) zeros.
type View struct {
	resident *os.File // owned by the Images
	release  func()   // gives it back; nil without a snapshot
	layers   Layers
	ranges   []layerfmt.Range
}

// Close gives back what the view holds. It may be repeated.
func (v *View) Close() {
	if v.release != nil {
		v.release()
		v.release = nil
	}
	v.layers.Close()
}

// View opens the memory of the last state of chain for reading; of an empty chain it is
// zeros. The caller closes it.
func (r *Images) View(chain []engine.State, memoryMiB int) (v View, err error) {
	if len(chain) == 0 {
		return v, nil
	}
	if v.resident, v.release = r.Peek(chain[len(chain)-1].ID); v.resident != nil {
		return v, nil
	}
	if v.layers, err = OpenLayers(chain, int64(memoryMiB)<<20); err != nil {
		v.Close()
		return v, err
	}
	if v.ranges, err = layerfmt.Plan(v.layers.Readers); err != nil {
		v.Close()
	}
	return v, err
}

// Read fills b with the memory from page on.
func (v *View) Read(b []byte, page uint64) error {
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
		r := RangeOf(v.ranges, page)
		n := min(uint64(len(b)), (r.Unit+r.Count-page)*linux.PageSize)
		if r.Layer == layerfmt.ZeroLayer {
			clear(b[:n])
		} else if _, err := v.layers.Files[r.Layer].ReadAt(b[:n], r.Offset+int64(page-r.Unit)*linux.PageSize); err != nil {
			return fmt.Errorf("read parent memory at page %d: %w", page, err)
		}
		b = b[n:]
		page += n / linux.PageSize
	}
	return nil
}

// PutChanged writes the pages of now, the first of which is page, that differ from old.
func PutChanged(w *layerfmt.Writer, page uint64, now, old []byte) error {
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
