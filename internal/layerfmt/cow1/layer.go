package cow1

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// Kind tells what a layer says about a block.
type Kind uint8

// The kinds of blocks.
const (
	Absent Kind = iota // see below
	Zero
	Data
)

// Run is a number of blocks for which a layer says the same; data lies without gaps.
type Run struct {
	Kind   Kind
	Count  uint64
	Offset int64 // of the first block in the file, if Kind is Data
}

// Layer is a sealed file, or an overlay that is only read from now on.
type Layer struct {
	src   io.ReaderAt
	p     preamble
	cache [cachedPages]cachedPage
	buf   *[2 * pageLen]byte // for reading a page; layers of one disk share it
}

// cachedPages bounds the memory of a layer (16 pages: maps of 64 MiB of disk).
const cachedPages = 16

type cachedPage struct {
	no      uint64 // plus one; 0: nothing is cached here
	absent  bool   // the page says nothing; entries is not used
	entries *[pageEntries]uint32
}

// Open reads the header of the sealed layer of size bytes in src, which must stay valid while the
// Layer is used. The map is checked where it is read; [Layer.Verify] reads all of it.
func Open(src io.ReaderAt, size int64) (*Layer, error) {
	p, err := readHeader(src, size)
	if err != nil {
		return nil, fmt.Errorf("open disk layer: %w", err)
	}
	if !p.sealed {
		return nil, fmt.Errorf("open disk layer: %w", ErrUnsealed)
	}
	if want := p.slotOffset(p.slots); size != want {
		return nil, fmt.Errorf("open disk layer: %d bytes, the header says %d: %w", size, want, ErrSize)
	}
	return &Layer{src: src, p: p}, nil
}

// Header returns what the layer describes.
func (l *Layer) Header() Header { return l.p.Header }

// Stats counts what the layer holds, as its header says.
func (l *Layer) Stats() Stats {
	return Stats{DataBlocks: l.p.data, ZeroBlocks: l.p.zero, FileBytes: l.p.slotOffset(l.p.slots)}
}

// Find returns the run that begins at block, of at most limit blocks (at least 1). block is below the
// length of the disk.
func (l *Layer) Find(block, limit uint64) (Run, error) {
	no, at := block/pageEntries, block%pageEntries
	entries, err := l.load(no)
	if err != nil {
		return Run{}, err
	}
	limit = min(limit, pageEntries-at)
	if entries == nil {
		return Run{Kind: Absent, Count: limit}, nil
	}
	return findRun(entries, at, limit, l.p.Header), nil
}

// findRun joins equal or consecutive entries from at on.
func findRun(entries *[pageEntries]uint32, at, limit uint64, h Header) Run {
	first := entries[at]
	n := uint64(1)
	if first < firstSlot {
		for n < limit && entries[at+n] == first {
			n++
		}
		return Run{Kind: Kind(first), Count: n}
	}
	for n < limit && entries[at+n] == first+uint32(n) {
		n++
	}
	return Run{Kind: Data, Count: n, Offset: h.slotOffset(uint64(first - firstSlot))}
}

// load returns the entries of a page, or nil if it says nothing.
func (l *Layer) load(no uint64) (*[pageEntries]uint32, error) {
	c := &l.cache[no%cachedPages]
	if c.no != no+1 {
		if err := l.fill(c, no); err != nil {
			c.no = 0
			return nil, fmt.Errorf("read map page %d of disk layer: %w", no, err)
		}
	}
	if c.absent {
		return nil, nil
	}
	return c.entries, nil
}

func (l *Layer) fill(c *cachedPage, no uint64) error {
	if l.buf == nil {
		l.buf = new([2 * pageLen]byte)
	}
	b := l.buf[:]
	if err := readFull(l.src, b, pageOffset(no, 0)); err != nil {
		return err
	}
	content, _, damaged := newest(b, no)
	if damaged {
		return ErrChecksum
	}
	c.no, c.absent = no+1, content == nil
	if c.absent {
		return nil
	}
	if c.entries == nil {
		c.entries = new([pageEntries]uint32)
	}
	return decodeEntries(c.entries, content, l.p.Header, no, l.p.slots)
}

// Verify reads the whole map and checks it: every copy of every page is whole, no two blocks share
// bytes, and the counts in the header are right. What the blocks hold has no checksum here; the digest
// of the file in the snapshot's manifest covers it.
func (l *Layer) Verify(ctx context.Context) error {
	used := newBitmap(l.p.slots)
	var data, zero uint64
	for no := range l.p.pages() {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("verify disk layer: %w", err)
		}
		entries, err := l.load(no)
		if err != nil {
			return fmt.Errorf("verify disk layer: %w", err)
		}
		if entries == nil {
			continue
		}
		for i, e := range entries {
			switch {
			case e == entryZero:
				zero++
			case e >= firstSlot && !used.set(uint64(e-firstSlot)):
				return fmt.Errorf("verify disk layer: block %d and another one are in slot %d: %w", no*pageEntries+uint64(i), e-firstSlot, ErrContent)
			case e >= firstSlot:
				data++
			}
		}
	}
	if data != l.p.data || zero != l.p.zero {
		return fmt.Errorf("verify disk layer: %d data and %d zero blocks, the header says %d and %d: %w", data, zero, l.p.data, l.p.zero, ErrContent)
	}
	return nil
}

func readFull(src io.ReaderAt, b []byte, off int64) error {
	n, err := src.ReadAt(b, off)
	if n == len(b) {
		return nil
	}
	if errors.Is(err, io.EOF) || err == nil {
		return fmt.Errorf("%d bytes at %d, want %d: %w", n, off, len(b), ErrSize)
	}
	return err
}
