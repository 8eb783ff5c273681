package kvm

import (
	"context"
	"os"
	"slices"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmwire"
)

// maxMappedLayers bounds the layers that are mapped from their files: their descriptors go in
// one message with those of the disk.
const maxMappedLayers = 24

// memoryPlan is where a machine's memory comes from.
type memoryPlan struct {
	memory vmmwire.Memory
	base   string // id of the snapshot whose memory file is the lowest
	files  []*os.File
	close  func() // gives back files and memory file
}

// planMemory plans the memory of the last state of chain. The root's layer is a memory file; what
// is above is mapped from the store, unless it is too much in too many pieces. room is how many files
// there may be.
func (d *Driver) planMemory(ctx context.Context, chain []engine.State, memoryMiB, room int) (_ memoryPlan, err error) {
	layers, err := memimage.OpenLayers(chain, int64(memoryMiB)<<20)
	if err != nil {
		return memoryPlan{}, err
	}
	defer func() {
		if err != nil {
			layers.Close()
		}
	}()
	ranges, err := layerfmt.Plan(layers.Readers)
	if err != nil {
		return memoryPlan{}, err
	}
	last := len(chain) - 1
	base := 0
	for base < last && layers.Readers[base+1].Header().Parent == "" {
		base++ // a layer without a parent hides all below
	}
	var below []layerfmt.Extent
	if base < last {
		below = layers.Readers[base].Extents()
	}
	m, used := filePlan(ranges, base, below)
	if len(m.Ranges) > vmmwire.MaxRanges || len(used) > min(maxMappedLayers, room-1) {
		base = last
		m, used = filePlan(ranges, base, nil)
	}
	image, release, err := d.images.Get(ctx, chain[:base+1], memoryMiB)
	if err != nil {
		return memoryPlan{}, err
	}
	p := memoryPlan{memory: m, base: chain[base].ID, files: []*os.File{image}, close: func() { layers.Close(); release() }}
	for _, l := range used {
		p.files = append(p.files, layers.Files[l])
	}
	return p, nil
}

// filePlan turns a plan of layers into one of files: file 0 is the merged memory up to
// layer base, the others are the layers above it that are used, whose numbers it returns.
// below are the extents of layer base, if it is not the last.
func filePlan(ranges []layerfmt.Range, base int, below []layerfmt.Extent) (m vmmwire.Memory, used []int) {
	files := map[int]int{}
	for _, r := range ranges {
		out := vmmwire.Range{Page: r.Unit, Count: r.Count, Offset: r.Unit * linux.PageSize}
		switch {
		case r.Layer == layerfmt.ZeroLayer && !overlaps(below, r):
			continue // pages in no range are zero, and so are the holes of file 0
		case r.Layer == layerfmt.ZeroLayer:
			out.File, out.Offset = vmmwire.NoFile, 0
		case r.Layer > base:
			f, known := files[r.Layer]
			if !known {
				used = append(used, r.Layer)
				f = len(used)
				files[r.Layer] = f
			}
			out.File, out.Offset = f, uint64(r.Offset)
		}
		m.Ranges = appendRange(m.Ranges, out)
	}
	return m, used
}

// overlaps tells whether r touches data of the ascending extents.
func overlaps(extents []layerfmt.Extent, r layerfmt.Range) bool {
	i, _ := slices.BinarySearchFunc(extents, r.Unit, func(e layerfmt.Extent, unit uint64) int {
		if e.End() <= unit {
			return -1
		}
		return 1
	})
	for ; i < len(extents) && extents[i].Unit < r.Unit+r.Count; i++ {
		if extents[i].Kind == layerfmt.Data {
			return true
		}
	}
	return false
}

// appendRange joins out to the last range if that goes on in the same place.
func appendRange(list []vmmwire.Range, out vmmwire.Range) []vmmwire.Range {
	if n := len(list); n > 0 {
		last := &list[n-1]
		end := last.Page + last.Count
		if last.File == out.File && end == out.Page && (out.File == vmmwire.NoFile || last.Offset+last.Count*linux.PageSize == out.Offset) {
			last.Count += out.Count
			return list
		}
		// Zeros between two ranges of the memory file are holes of it.
		if last.File == 0 && out.File == 0 && out.Page > end {
			last.Count = out.Page + out.Count - last.Page
			return list
		}
	}
	return append(list, out)
}
