package cow1

import (
	"fmt"
	"io"

	"forkd.dev/forkd/internal/errdefs"
)

// Disk is a chain of layers with an overlay on top.
type Disk struct {
	top    *Overlay
	layers []*Layer // the one right below the overlay first
	base   io.ReaderAt
	// baseBytes is the length of the base; behind it the disk is zero.
	baseBytes int64
	scratch   [BlockSize]byte
}

// Chain is what a disk consists of.
type Chain struct {
	Top *Overlay
	// Layers are sealed, that of the root snapshot first. All have the length of Top.
	Layers []*Layer
	// Base is the image below them, of BaseBytes, at most the length of the disk; nil
	// is an image of zeros.
	Base      io.ReaderAt
	BaseBytes int64
}

// NewDisk stacks a chain. The disk owns the layers and the overlay, the files stay the caller's.
func NewDisk(c Chain) (*Disk, error) {
	if c.Top == nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "open disk: no overlay")
	}
	blocks := c.Top.header.Blocks
	if c.BaseBytes < 0 || uint64(c.BaseBytes) > blocks*BlockSize || (c.Base == nil && c.BaseBytes != 0) {
		return nil, errdefs.New(errdefs.ErrInvalid, "open disk: an image of %d bytes below %d blocks", c.BaseBytes, blocks)
	}
	d := &Disk{top: c.Top, base: c.Base, baseBytes: c.BaseBytes}
	for i, l := range c.Layers {
		if l.p.Blocks != blocks {
			return nil, errdefs.New(errdefs.ErrInvalid, "open disk: layer %d has %d blocks, the disk %d", i, l.p.Blocks, blocks)
		}
		d.push(l)
	}
	return d, nil
}

func (d *Disk) push(l *Layer) {
	if len(d.layers) > 0 {
		l.buf = d.layers[0].buf
	}
	if l.buf == nil {
		l.buf = new([2 * pageLen]byte)
	}
	d.layers = append([]*Layer{l}, d.layers...)
}

// Bytes is the length of the disk.
func (d *Disk) Bytes() int64 { return int64(d.top.header.Blocks) * BlockSize }

// Overlay returns the layer on top.
func (d *Disk) Overlay() *Overlay { return d.top }

// Depth counts the sealed layers.
func (d *Disk) Depth() int { return len(d.layers) }

// check refuses ranges that are not inside of the disk. Sums may not wrap.
func (d *Disk) check(off, n int64) error {
	if off < 0 || n < 0 || off > d.Bytes() || n > d.Bytes()-off {
		return errdefs.New(errdefs.ErrInvalid, "disk range %d+%d of %d bytes", off, n, d.Bytes())
	}
	return nil
}

// find returns the longest run from block on that lies in one place, and that place; a
// nil place means zeros.
func (d *Disk) find(block, limit uint64) (Run, io.ReaderAt, error) {
	r := d.top.Find(block, limit)
	var src io.ReaderAt = d.top.f
	for i := 0; r.Kind == Absent && i < len(d.layers); i++ {
		l := d.layers[i]
		src = l.src
		var err error
		if r, err = l.Find(block, r.Count); err != nil {
			return r, nil, err
		}
	}
	switch r.Kind {
	case Zero:
		return r, nil, nil
	case Data:
		return r, src, nil
	}
	r.Offset = int64(block) * BlockSize
	if r.Offset >= d.baseBytes {
		return r, nil, nil
	}
	// The last block of the base may be a part of one: ReadAt fills up with zeros.
	r.Count = min(r.Count, uint64(d.baseBytes-r.Offset+BlockSize-1)/BlockSize)
	return r, d.base, nil
}

// ReadAt fills p from offset off; both may be anything inside of the disk.
func (d *Disk) ReadAt(p []byte, off int64) error {
	if err := d.check(off, int64(len(p))); err != nil {
		return err
	}
	for len(p) > 0 {
		in := off % BlockSize
		r, src, err := d.find(uint64(off/BlockSize), uint64(in+int64(len(p))+BlockSize-1)/BlockSize)
		if err != nil {
			return fmt.Errorf("read disk at %d: %w", off, err)
		}
		part := p[:min(int64(len(p)), int64(r.Count)*BlockSize-in)]
		if src == nil {
			clear(part)
		} else if err := d.readPart(src, part, r.Offset+in); err != nil {
			return fmt.Errorf("read disk at %d: %w", off, err)
		}
		p, off = p[len(part):], off+int64(len(part))
	}
	return nil
}

func (d *Disk) readPart(src io.ReaderAt, p []byte, off int64) error {
	if src == d.base && off+int64(len(p)) > d.baseBytes {
		n := max(d.baseBytes-off, 0)
		clear(p[n:])
		p = p[:n]
	}
	return readFull(src, p, off)
}

// WriteAt stores p at offset off. After an error the range may hold anything.
func (d *Disk) WriteAt(p []byte, off int64) error {
	if err := d.check(off, int64(len(p))); err != nil {
		return err
	}
	for len(p) > 0 {
		var n int64
		var err error
		if off%BlockSize != 0 || len(p) < BlockSize {
			n, err = d.writePartial(p, off)
		} else {
			n, err = d.writeBlocks(p, off)
		}
		if err != nil {
			return fmt.Errorf("write disk at %d: %w", off, err)
		}
		p, off = p[n:], off+n
	}
	return nil
}

func (d *Disk) writeBlocks(p []byte, off int64) (int64, error) {
	r, err := d.top.Place(uint64(off/BlockSize), uint64(len(p)/BlockSize))
	if err != nil {
		return 0, err
	}
	n := int64(r.Count) * BlockSize
	_, err = d.top.f.WriteAt(p[:n], r.Offset)
	return n, err
}

// writePartial stores the part of p that lies in the block of off. The rest of the
// block comes from below if the overlay does not have it yet.
func (d *Disk) writePartial(p []byte, off int64) (int64, error) {
	block, in := uint64(off/BlockSize), off%BlockSize
	p = p[:min(int64(len(p)), BlockSize-in)]
	if r := d.top.Find(block, 1); r.Kind == Data {
		if _, err := d.top.Place(block, 1); err != nil {
			return 0, err
		}
		_, err := d.top.f.WriteAt(p, r.Offset+in)
		return int64(len(p)), err
	}
	if err := d.ReadAt(d.scratch[:], int64(block)*BlockSize); err != nil {
		return 0, err
	}
	copy(d.scratch[in:], p)
	_, err := d.writeBlocks(d.scratch[:], int64(block)*BlockSize)
	return int64(len(p)), err
}

// Zero makes a range zero and gives back the space of the blocks that lie in it as a
// whole.
func (d *Disk) Zero(off, n int64) error {
	if err := d.check(off, n); err != nil {
		return err
	}
	end := off + n
	if head := min((BlockSize-off%BlockSize)%BlockSize, n); head > 0 {
		if err := d.WriteAt(zeros[:head], off); err != nil {
			return err
		}
		off += head
	}
	if tail := end % BlockSize; tail > 0 && end > off {
		if err := d.WriteAt(zeros[:tail], end-tail); err != nil {
			return err
		}
		end -= tail
	}
	if end > off {
		return d.top.SetZero(uint64(off/BlockSize), uint64(end-off)/BlockSize)
	}
	return nil
}

// Discard gives back the space of the blocks that lie in the range as a whole; they
// read as zeros afterwards. The rest of the range stays as it is.
func (d *Disk) Discard(off, n int64) error {
	if err := d.check(off, n); err != nil {
		return err
	}
	first, end := (off+BlockSize-1)/BlockSize, (off+n)/BlockSize
	if end <= first {
		return nil
	}
	return d.top.SetZero(uint64(first), uint64(end-first))
}

// Flush is Flush of the overlay.
func (d *Disk) Flush() error { return d.top.Flush() }

// Freeze seals the overlay, which becomes a layer of the disk, and goes on with next,
// which is empty. After an error the disk is as before. The sealed overlay is not synced.
func (d *Disk) Freeze(next *Overlay) error {
	if next.header.Blocks != d.top.header.Blocks || next.slots != 0 || len(next.pages) != 0 {
		return errdefs.New(errdefs.ErrInvalid, "freeze disk: the new overlay does not fit")
	}
	if err := d.top.Seal(); err != nil {
		return err
	}
	l, err := d.top.AsLayer()
	if err != nil {
		return err
	}
	d.push(l)
	d.top = next
	return nil
}
