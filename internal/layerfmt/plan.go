package layerfmt

import (
	"container/heap"

	"forkd.dev/forkd/internal/errdefs"
)

// ZeroLayer is the Layer of a range that is zero.
const ZeroLayer = -1

// Range is a run of units with one source.
type Range struct {
	Unit   uint64
	Count  uint64
	Layer  int   // index in the chain, or ZeroLayer
	Offset int64 // of the data in that layer's file
}

// Plan says for every unit of the last layer of chain (root first) where its
// content lies. The ranges are ascending, cover the whole logical length without
// gaps, and are as few as possible. A layer without a parent hides all below it.
// It takes time in proportion to the extents times the logarithm of the depth.
func Plan(chain []*Reader) ([]Range, error) {
	if len(chain) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "plan layers: the chain is empty")
	}
	last := chain[len(chain)-1].header
	root := 0
	for i, r := range chain {
		if r.header.UnitSize != last.UnitSize || r.header.Units != last.Units {
			return nil, errdefs.New(errdefs.ErrCorrupt, "plan layers: layer %d has %d units of %d bytes, the last has %d of %d",
				i, r.header.Units, r.header.UnitSize, last.Units, last.UnitSize)
		}
		if r.header.Parent == "" {
			root = i
		}
	}
	if chain[root].header.Parent != "" {
		return nil, errdefs.New(errdefs.ErrCorrupt, "plan layers: the chain starts with a layer of parent %s, its root is missing", chain[root].header.Parent)
	}
	return newSweep(chain, root).run(last), nil
}

// sweep walks the units in order. Each layer has a cursor that is either in
// waiting (its extent starts later) or in active (its extent has started).
type sweep struct {
	chain   []*Reader
	waiting cursorHeap // the nearest start first
	active  cursorHeap // the topmost layer first
	out     []Range
}

// cursor stands on one extent of a layer.
type cursor struct {
	layer int
	rest  []Extent // rest[0] is the current one
}

func newSweep(chain []*Reader, root int) *sweep {
	s := &sweep{
		chain:   chain,
		waiting: cursorHeap{less: func(a, b cursor) bool { return a.rest[0].Unit < b.rest[0].Unit }},
		active:  cursorHeap{less: func(a, b cursor) bool { return a.layer > b.layer }},
	}
	for i := root; i < len(chain); i++ {
		if len(chain[i].extents) > 0 {
			heap.Push(&s.waiting, cursor{layer: i, rest: chain[i].extents})
		}
	}
	return s
}

func (s *sweep) run(h Header) []Range {
	for pos := uint64(0); pos < h.Units; {
		s.advance(pos)
		end := h.Units
		if s.waiting.Len() > 0 {
			end = s.waiting.items[0].rest[0].Unit
		}
		if s.active.Len() == 0 {
			s.emit(Range{Unit: pos, Count: end - pos, Layer: ZeroLayer})
			pos = end
			continue
		}
		top := s.active.items[0]
		e := top.rest[0]
		end = min(end, e.End())
		r := Range{Unit: pos, Count: end - pos, Layer: ZeroLayer}
		if e.Kind == Data {
			r.Layer = top.layer
			r.Offset = e.Offset + int64(pos-e.Unit)*int64(h.UnitSize)
		}
		s.emit(r)
		pos = end
	}
	return s.out
}

// advance makes active what covers pos. Extents of lower layers that end under a
// higher one are dropped when they come to the top.
func (s *sweep) advance(pos uint64) {
	for {
		for s.active.Len() > 0 && s.active.items[0].rest[0].End() <= pos {
			c := heap.Pop(&s.active).(cursor)
			for len(c.rest) > 0 && c.rest[0].End() <= pos {
				c.rest = c.rest[1:]
			}
			if len(c.rest) > 0 {
				heap.Push(&s.waiting, c)
			}
		}
		if s.waiting.Len() == 0 || s.waiting.items[0].rest[0].Unit > pos {
			return
		}
		heap.Push(&s.active, heap.Pop(&s.waiting).(cursor))
	}
}

// emit appends r, joined to the last range if that goes on in the same place.
func (s *sweep) emit(r Range) {
	if n := len(s.out); n > 0 {
		last := &s.out[n-1]
		size := int64(s.chain[0].header.UnitSize)
		if last.Layer == r.Layer && (r.Layer == ZeroLayer || last.Offset+int64(last.Count)*size == r.Offset) {
			last.Count += r.Count
			return
		}
	}
	s.out = append(s.out, r)
}

type cursorHeap struct {
	items []cursor
	less  func(a, b cursor) bool
}

func (h *cursorHeap) Len() int           { return len(h.items) }
func (h *cursorHeap) Less(i, j int) bool { return h.less(h.items[i], h.items[j]) }
func (h *cursorHeap) Swap(i, j int)      { h.items[i], h.items[j] = h.items[j], h.items[i] }
func (h *cursorHeap) Push(x any)         { h.items = append(h.items, x.(cursor)) }
func (h *cursorHeap) Pop() any {
	last := len(h.items) - 1
	c := h.items[last]
	h.items = h.items[:last]
	return c
}
