package memimage

import (
	"cmp"
	"context"
	"os"
	"slices"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
)

// mergeChunk is how much is copied at a time.
const mergeChunk = 1 << 20

// Merge writes one layer that holds what the memory layers of k.Chain from k.Keep on
// hold, on top of the last state that stays, to the new or emptied file path.
func Merge(ctx context.Context, k engine.Compaction, path string) error {
	layers, err := OpenLayers(k.Chain, 0)
	if err != nil {
		return err
	}
	defer layers.Close()
	ranges, err := layerfmt.Plan(layers.Readers)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	h := layerfmt.Header{Units: layers.Readers[0].Header().Units}
	if k.Keep > 0 {
		h.Parent = k.Chain[k.Keep-1].ID
	}
	w, err := layerfmt.NewWriter(f, h)
	if err != nil {
		return err
	}
	m := merge{w: w, layers: layers, keep: k.Keep, limit: NewThrottle(k.BytesPerSecond), buf: make([]byte, mergeChunk)}
	if k.Keep > 0 {
		m.zeros = zeroExtents(layers.Readers[k.Keep:])
	}
	for _, r := range ranges {
		if err := m.add(ctx, r); err != nil {
			return err
		}
	}
	return w.Close()
}

// merge writes what the layers from keep on hold into one.
type merge struct {
	w      *layerfmt.Writer
	layers Layers
	keep   int
	zeros  []layerfmt.Extent // that the layers from keep on made zero, ascending
	limit  *Throttle
	buf    []byte
}

// add takes over one range of the plan of all layers. What lies in a layer that stays
// is left out, and so are zeros that no layer from keep on wrote.
func (m *merge) add(ctx context.Context, r layerfmt.Range) error {
	if r.Layer == layerfmt.ZeroLayer {
		return m.addZeros(r)
	}
	if r.Layer < m.keep {
		return nil
	}
	for done := uint64(0); done < r.Count; {
		n := min(uint64(len(m.buf))/linux.PageSize, r.Count-done)
		b := m.buf[:n*linux.PageSize]
		if err := m.limit.Wait(ctx, int64(len(b))); err != nil {
			return err
		}
		if _, err := m.layers.Files[r.Layer].ReadAt(b, r.Offset+int64(done)*linux.PageSize); err != nil {
			return err
		}
		if err := m.w.Put(r.Unit+done, b); err != nil {
			return err
		}
		done += n
	}
	return nil
}

func (m *merge) addZeros(r layerfmt.Range) error {
	end := r.Unit + r.Count
	for len(m.zeros) > 0 && m.zeros[0].Unit < end {
		e := m.zeros[0]
		if from, to := max(e.Unit, r.Unit), min(e.End(), end); from < to {
			if err := m.w.Zero(from, to-from); err != nil {
				return err
			}
		}
		if e.End() > end {
			return nil // the rest belongs to a later range
		}
		m.zeros = m.zeros[1:]
	}
	return nil
}

// zeroExtents returns the units that any of the layers made zero, ascending and
// without overlap.
func zeroExtents(layers []*layerfmt.Reader) []layerfmt.Extent {
	var all []layerfmt.Extent
	for _, l := range layers {
		for _, e := range l.Extents() {
			if e.Kind == layerfmt.Zero {
				all = append(all, e)
			}
		}
	}
	slices.SortFunc(all, func(a, b layerfmt.Extent) int { return cmp.Compare(a.Unit, b.Unit) })
	var out []layerfmt.Extent
	for _, e := range all {
		if n := len(out); n > 0 && out[n-1].End() >= e.Unit {
			last := &out[n-1]
			last.Count = max(last.End(), e.End()) - last.Unit
			continue
		}
		out = append(out, e)
	}
	return out
}

// Throttle bounds how fast something is done, by one goroutine.
type Throttle struct {
	rate  int64 // bytes per second; 0 is no bound
	began time.Time
	done  int64
}

// NewThrottle begins now. A rate of 0 is no bound.
func NewThrottle(bytesPerSecond int64) *Throttle {
	return &Throttle{rate: bytesPerSecond, began: time.Now()}
}

// Wait returns when n more bytes may be done.
func (t *Throttle) Wait(ctx context.Context, n int64) error {
	if t.rate == 0 {
		return ctx.Err()
	}
	t.done += n
	due := t.began.Add(time.Duration(float64(t.done) / float64(t.rate) * float64(time.Second)))
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}
