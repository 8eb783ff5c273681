package layerfmt

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
)

// Reader is an open layer. All methods are safe for concurrent use.
type Reader struct {
	src     io.ReaderAt
	header  Header
	extents []Extent
	stats   Stats
}

// readChunk bounds what is read and allocated at once.
const readChunk = 1 << 20

// Open reads the header and the extent table of the layer of size bytes in src
// and checks all of it. The data is not read. src must stay valid while the
// Reader is used.
func Open(src io.ReaderAt, size int64) (*Reader, error) {
	r, err := open(src, size)
	if err != nil {
		return nil, fmt.Errorf("open layer: %w", err)
	}
	return r, nil
}

func open(src io.ReaderAt, size int64) (*Reader, error) {
	head := make([]byte, headerLen)
	n, err := src.ReadAt(head[:min(max(size, 0), headerLen)], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if n < headerLen {
		// Something else than a layer is told so even if it is short.
		if n >= len(magic) && string(head[:len(magic)]) != magic {
			return nil, fmt.Errorf("first bytes are %q: %w", head[:len(magic)], ErrMagic)
		}
		return nil, fmt.Errorf("%d bytes are less than a header: %w", n, ErrSize)
	}
	p, err := decodePreamble(head)
	if err != nil {
		return nil, err
	}
	if size != p.fileBytes {
		return nil, fmt.Errorf("%d bytes, the header says %d: %w", size, p.fileBytes, ErrSize)
	}
	r := &Reader{src: src, header: p.Header}
	if err := r.readTable(p); err != nil {
		return nil, err
	}
	r.stats.Extents, r.stats.FileBytes = len(r.extents), size
	return r, nil
}

// readTable reads in chunks, so that a wrong size costs no more memory than src has bytes.
func (r *Reader) readTable(p preamble) error {
	buf := make([]byte, min(int64(p.extents)*extentLen, readChunk))
	crc := uint32(0)
	check := tableCheck{header: p.Header, offset: int64(p.UnitSize)}
	for off := p.tableOffset; off < p.fileBytes; off += int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), p.fileBytes-off)]
		if err := readFull(r.src, buf, off); err != nil {
			return fmt.Errorf("read extent table: %w", err)
		}
		crc = crc32.Update(crc, castagnoli, buf)
		for b := buf; len(b) > 0; b = b[extentLen:] {
			r.extents = append(r.extents, decodeExtent(b))
		}
	}
	if crc != p.tableCRC {
		return fmt.Errorf("extent table has CRC %08x, not %08x: %w", crc, p.tableCRC, ErrChecksum)
	}
	for i, e := range r.extents {
		if err := check.next(e); err != nil {
			return fmt.Errorf("extent %d of %d: %w: %w", i, len(r.extents), ErrTable, err)
		}
	}
	if check.offset != p.tableOffset {
		return fmt.Errorf("extents cover %d bytes of data, the file has %d: %w",
			check.offset-int64(p.UnitSize), p.tableOffset-int64(p.UnitSize), ErrTable)
	}
	r.stats = check.stats
	return nil
}

// tableCheck walks the extents in order. Data lies in the same order without gaps,
// so no two extents can share bytes.
type tableCheck struct {
	header Header
	unit   uint64 // first unit not yet described
	offset int64  // where the next data must lie
	stats  Stats
}

func (c *tableCheck) next(e Extent) error {
	if e.Count == 0 || e.Unit < c.unit || e.Unit >= c.header.Units || e.Count > c.header.Units-e.Unit {
		return fmt.Errorf("units %d+%d after %d of %d", e.Unit, e.Count, c.unit, c.header.Units)
	}
	c.unit = e.End()
	switch e.Kind {
	case Data:
		if e.Offset != c.offset {
			return fmt.Errorf("data at %d instead of %d", e.Offset, c.offset)
		}
		c.offset += int64(e.Count) * int64(c.header.UnitSize)
		c.stats.DataUnits += e.Count
	case Zero:
		if e.Offset != 0 || e.CRC != 0 {
			return errors.New("zero extent with data")
		}
		c.stats.ZeroUnits += e.Count
	default:
		return fmt.Errorf("unknown kind %d", e.Kind)
	}
	return nil
}

// Header returns what the layer describes.
func (r *Reader) Header() Header { return r.header }

// Stats counts what the layer holds.
func (r *Reader) Stats() Stats { return r.stats }

// Extents returns a copy of the extents in ascending order.
func (r *Reader) Extents() []Extent { return slices.Clone(r.extents) }

// Verify reads all data and compares its checksums.
func (r *Reader) Verify(ctx context.Context) error {
	buf := make([]byte, readChunk)
	for _, e := range r.extents {
		if e.Kind != Data {
			continue
		}
		crc := uint32(0)
		end := e.Offset + int64(e.Count)*int64(r.header.UnitSize)
		for off := e.Offset; off < end; off += int64(len(buf)) {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("verify layer: %w", err)
			}
			b := buf[:min(int64(len(buf)), end-off)]
			if err := readFull(r.src, b, off); err != nil {
				return fmt.Errorf("verify layer: %w", err)
			}
			crc = crc32.Update(crc, castagnoli, b)
		}
		if crc != e.CRC {
			return fmt.Errorf("verify layer: units %d+%d have CRC %08x, not %08x: %w", e.Unit, e.Count, crc, e.CRC, ErrChecksum)
		}
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
