package cow1

import (
	"context"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
)

// mergeChunk bounds what is copied at once.
const mergeChunk = 1 << 20

// Merge writes into dst, which is empty, the layer that says what layers (the lowest
// first) say together, and seals it. It does not sync.
func Merge(ctx context.Context, dst File, h Header, layers []*Layer) (Stats, error) {
	for i, l := range layers {
		if l.p.Blocks != h.Blocks {
			return Stats{}, errdefs.New(errdefs.ErrInvalid, "merge disk layers: layer %d has %d blocks, not %d", i, l.p.Blocks, h.Blocks)
		}
	}
	o, err := Create(dst, h, SyncProcess)
	if err != nil {
		return Stats{}, err
	}
	m := merger{layers: layers, out: o, buf: make([]byte, mergeChunk)}
	for block := uint64(0); block < h.Blocks; {
		if err := ctx.Err(); err != nil {
			return Stats{}, fmt.Errorf("merge disk layers: %w", err)
		}
		n, err := m.step(block, h.Blocks-block)
		if err != nil {
			return Stats{}, fmt.Errorf("merge disk layers: block %d: %w", block, err)
		}
		block += n
	}
	if err := o.Seal(); err != nil {
		return Stats{}, err
	}
	return o.Stats(), nil
}

type merger struct {
	layers []*Layer
	out    *Overlay
	buf    []byte
}

// step copies one run that begins at block and returns its length.
func (m *merger) step(block, limit uint64) (uint64, error) {
	r := Run{Count: min(limit, mergeChunk/BlockSize)}
	for i := len(m.layers) - 1; i >= 0; i-- {
		l := m.layers[i]
		var err error
		if r, err = l.Find(block, r.Count); err != nil {
			return 0, err
		}
		if r.Kind == Data {
			return r.Count, m.copyRun(l, block, r)
		}
		if r.Kind == Zero {
			return r.Count, m.out.SetZero(block, r.Count)
		}
	}
	return r.Count, nil
}

func (m *merger) copyRun(l *Layer, block uint64, r Run) error {
	b := m.buf[:r.Count*BlockSize]
	if err := readFull(l.src, b, r.Offset); err != nil {
		return err
	}
	for len(b) > 0 {
		to, err := m.out.Place(block, uint64(len(b))/BlockSize)
		if err != nil {
			return err
		}
		n := to.Count * BlockSize
		if _, err := m.out.f.WriteAt(b[:n], to.Offset); err != nil {
			return err
		}
		b, block = b[n:], block+to.Count
	}
	return nil
}
