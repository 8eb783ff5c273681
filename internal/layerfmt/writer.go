package layerfmt

import (
	"bufio"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"forkd.dev/forkd/internal/errdefs"
)

// Writer writes one layer in one pass, extents in ascending order. A Writer that
// has failed stays failed. It is not safe for concurrent use.
type Writer struct {
	header  Header
	f       io.WriteSeeker
	buf     *bufio.Writer
	extents []Extent
	next    uint64 // first unit that may still be written
	offset  int64  // of the next data byte in the file
	stats   Stats
	err     error
}

// Stats counts what a layer holds.
type Stats struct {
	Extents   int
	DataUnits uint64
	ZeroUnits uint64
	FileBytes int64
}

// small writes are joined to this size; larger ones go straight to the file.
const writeBuffer = 256 << 10

// NewWriter starts a layer in f, which must be empty and at its start. Until Close
// has succeeded, the file is no valid layer. The caller closes and syncs f.
func NewWriter(f io.WriteSeeker, h Header) (*Writer, error) {
	if h.UnitSize == 0 {
		h.UnitSize = DefaultUnitSize
	}
	if err := h.check(); err != nil {
		return nil, fmt.Errorf("create layer: %w: %w", errdefs.ErrInvalid, err)
	}
	w := &Writer{header: h, f: f, buf: bufio.NewWriterSize(f, writeBuffer), offset: int64(h.UnitSize)}
	// The place of the header holds zeros: a crash leaves a file without magic.
	for left := int(h.UnitSize); left > 0; left -= len(zeros) {
		if _, err := w.buf.Write(zeros[:]); err != nil {
			return nil, fmt.Errorf("write layer: %w", err)
		}
	}
	return w, nil
}

// Data stores b, a whole number of units, as the content of the units from unit
// on, whatever it is. b is not kept.
func (w *Writer) Data(unit uint64, b []byte) error {
	count := uint64(len(b)) / uint64(w.header.UnitSize)
	if w.err == nil && uint64(len(b))%uint64(w.header.UnitSize) != 0 {
		w.err = errdefs.New(errdefs.ErrInvalid, "write layer: %d bytes at unit %d are not whole units of %d", len(b), unit, w.header.UnitSize)
	}
	if !w.claim(unit, count) {
		return w.err
	}
	if _, err := w.buf.Write(b); err != nil {
		w.err = fmt.Errorf("write layer: %w", err)
		return w.err
	}
	w.add(Extent{Unit: unit, Count: count, Offset: w.offset, Kind: Data}, b)
	w.offset += int64(len(b))
	w.stats.DataUnits += count
	return w.err
}

// Zero says that count units from unit on are zero.
func (w *Writer) Zero(unit, count uint64) error {
	if !w.claim(unit, count) {
		return w.err
	}
	w.add(Extent{Unit: unit, Count: count, Kind: Zero}, nil)
	w.stats.ZeroUnits += count
	return w.err
}

// Put stores b like Data, but says of units that hold only zeros that they are zero.
func (w *Writer) Put(unit uint64, b []byte) error {
	size := int(w.header.UnitSize)
	for len(b) > size {
		zero, n := allZero(b[:size]), size
		for n+size <= len(b) && allZero(b[n:n+size]) == zero {
			n += size
		}
		if err := w.putRun(unit, b[:n], zero); err != nil {
			return err
		}
		unit, b = unit+uint64(n/size), b[n:]
	}
	if len(b) == 0 {
		return w.err
	}
	return w.putRun(unit, b, len(b) == size && allZero(b))
}

func (w *Writer) putRun(unit uint64, b []byte, zero bool) error {
	if zero {
		return w.Zero(unit, uint64(len(b))/uint64(w.header.UnitSize))
	}
	return w.Data(unit, b)
}

// claim checks that the units may be written now and tells whether there is
// something to write.
func (w *Writer) claim(unit, count uint64) bool {
	switch {
	case w.err != nil || count == 0:
		return false
	case unit < w.next:
		w.err = errdefs.New(errdefs.ErrInvalid, "write layer: unit %d after unit %d was written", unit, w.next-1)
	case unit >= w.header.Units || count > w.header.Units-unit:
		w.err = errdefs.New(errdefs.ErrInvalid, "write layer: units %d+%d lie outside of %d", unit, count, w.header.Units)
	}
	return w.err == nil
}

func (w *Writer) add(e Extent, data []byte) {
	w.next = e.End()
	if n := len(w.extents); n > 0 {
		if last := &w.extents[n-1]; last.Kind == e.Kind && last.End() == e.Unit {
			last.Count += e.Count
			last.CRC = crc32.Update(last.CRC, castagnoli, data)
			return
		}
	}
	if len(w.extents) == MaxExtents {
		w.err = errdefs.New(errdefs.ErrResourceExhausted, "write layer: more than %d extents", MaxExtents)
		return
	}
	e.CRC = crc32.Update(0, castagnoli, data)
	w.extents = append(w.extents, e)
}

// Close writes the extent table and the header. It does not close the file.
func (w *Writer) Close() error {
	if w.err != nil {
		return w.err
	}
	w.err = w.finish()
	if w.err != nil {
		return w.err
	}
	w.err = errdefs.As(errdefs.ErrInvalid, errors.New("write layer: it is closed"))
	return nil
}

func (w *Writer) finish() error {
	crc := uint32(0)
	var b [extentLen]byte
	for _, e := range w.extents {
		e.appendTo(b[:0])
		crc = crc32.Update(crc, castagnoli, b[:])
		if _, err := w.buf.Write(b[:]); err != nil {
			return fmt.Errorf("write layer table: %w", err)
		}
	}
	if err := w.buf.Flush(); err != nil {
		return fmt.Errorf("write layer: %w", err)
	}
	p := preamble{
		Header:      w.header,
		tableOffset: w.offset,
		extents:     uint64(len(w.extents)),
		fileBytes:   w.offset + int64(len(w.extents))*extentLen,
		tableCRC:    crc,
	}
	if _, err := w.f.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("write layer header: %w", err)
	}
	if _, err := w.f.Write(p.encode()); err != nil {
		return fmt.Errorf("write layer header: %w", err)
	}
	w.stats.Extents, w.stats.FileBytes = len(w.extents), p.fileBytes
	return nil
}

// Stats counts what was written; Extents and FileBytes are set by Close.
func (w *Writer) Stats() Stats { return w.stats }
