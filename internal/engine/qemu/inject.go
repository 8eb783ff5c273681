package qemu

import (
	"fmt"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
)

// QEMU maps exactly one memory file. A snapshot that differs from an ancestor by
// few pages is forked from the ancestor's resident image, and its own pages are
// written into the new process before it loads its state. That costs some
// microseconds a page and a private copy in every fork; a resident image of its
// own costs its whole size once.

// maxInjectedPages is where a resident image becomes the better choice.
const maxInjectedPages = 1000

// base returns the index in chain of the snapshot whose resident image the last
// one is forked from: the nearest that has one already, or else the root-most,
// among those near enough.
func (d *Driver) base(chain []engine.State, layers memimage.Layers) int {
	units := uint64(0)
	for i := len(chain) - 1; ; i-- {
		if d.images.Has(chain[i].ID) {
			return i
		}
		stats := layers.Readers[i].Stats()
		units += stats.DataUnits + stats.ZeroUnits
		if i == 0 || layers.Readers[i].Header().Parent == "" || units > maxInjectedPages {
			return i
		}
	}
}

// inject writes the pages of the layers above base into the stopped machine.
func (m *Machine) inject(layers memimage.Layers, base int) error {
	if base == len(layers.Readers)-1 {
		return nil
	}
	ram, err := m.ram()
	if err != nil {
		return err
	}
	ranges, err := layerfmt.Plan(layers.Readers)
	if err != nil {
		return err
	}
	for _, r := range ranges {
		if r.Layer <= base {
			continue
		}
		buf := make([]byte, r.Count*linux.PageSize)
		if _, err := layers.Files[r.Layer].ReadAt(buf, r.Offset); err != nil {
			return fmt.Errorf("read memory layer %d: %w", r.Layer, err)
		}
		if err := linux.WriteProcess(m.rec.PID, ram.Start+r.Unit*linux.PageSize, buf); err != nil {
			return fmt.Errorf("write memory of %s: %w", m.rec.ID, err)
		}
	}
	return m.injectZeros(layers, base, ranges, ram)
}

// injectZeros writes the pages that a layer above base made zero. Other zeros of
// the plan are zero in the base, too.
func (m *Machine) injectZeros(layers memimage.Layers, base int, ranges []layerfmt.Range, ram linux.Mapping) error {
	zeros := make([]byte, linux.PageSize)
	for _, l := range layers.Readers[base+1:] {
		for _, e := range l.Extents() {
			if e.Kind != layerfmt.Zero {
				continue
			}
			for u := e.Unit; u < e.End(); u++ {
				if memimage.RangeOf(ranges, u).Layer != layerfmt.ZeroLayer {
					continue
				}
				if err := linux.WriteProcess(m.rec.PID, ram.Start+u*linux.PageSize, zeros); err != nil {
					return fmt.Errorf("write memory of %s: %w", m.rec.ID, err)
				}
			}
		}
	}
	return nil
}
