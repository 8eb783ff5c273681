package layerfmt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// Format is the name of this format in the list of a snapshot's artifacts.
const Format = "forkd-layer-1"

// Limits of the format. They bound what a reader allocates for a hostile file.
const (
	// DefaultUnitSize is the page size of the machines we run.
	DefaultUnitSize = 4096
	maxUnitSize     = 2 << 20
	// maxLogicalBytes keeps every offset far from the end of int64.
	maxLogicalBytes = 1 << 46
	// MaxExtents bounds the extent table (512 MiB on disk).
	MaxExtents = 1 << 24
)

const (
	magic      = "FORKDLYR"
	version    = 1
	headerLen  = 4096
	extentLen  = 32
	parentLen  = 24
	headerCRC  = headerLen - 4
	reservedAt = 72 + parentLen
)

// What is wrong with a file that is no layer this build can read.
var (
	ErrMagic    = errdefs.As(errdefs.ErrCorrupt, errors.New("not a forkd memory layer"))
	ErrSize     = errdefs.As(errdefs.ErrCorrupt, errors.New("layer is truncated or has a wrong size"))
	ErrChecksum = errdefs.As(errdefs.ErrCorrupt, errors.New("layer checksum does not match"))
	// ErrTable: the checksums match but the content contradicts itself, so it was
	// written by something else than this package.
	ErrTable   = errdefs.As(errdefs.ErrCorrupt, errors.New("layer contradicts itself"))
	ErrVersion = errdefs.As(errdefs.ErrIncompatible, errors.New("layer version is not supported"))
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header says what a layer describes.
type Header struct {
	UnitSize uint32 // power of two, 4096 to 2 MiB; 0 in NewWriter means 4096
	Units    uint64 // logical length
	Parent   string // id of the snapshot whose layer shows through; "" for a root
}

// LogicalBytes is the length of the memory that the layer describes.
func (h Header) LogicalBytes() int64 { return int64(h.Units) * int64(h.UnitSize) }

func (h Header) check() error {
	if h.UnitSize < DefaultUnitSize || h.UnitSize > maxUnitSize || h.UnitSize&(h.UnitSize-1) != 0 {
		return fmt.Errorf("unit size %d is not a power of two from %d to %d", h.UnitSize, DefaultUnitSize, maxUnitSize)
	}
	if h.Units == 0 || h.Units > maxLogicalBytes/uint64(h.UnitSize) {
		return fmt.Errorf("logical length of %d units is not between 1 and %d", h.Units, maxLogicalBytes/uint64(h.UnitSize))
	}
	if kind := ident.KindOf(h.Parent); h.Parent != "" && kind != ident.Snapshot && kind != ident.Checkpoint {
		return fmt.Errorf("parent %.40q is not a snapshot id", h.Parent)
	}
	return nil
}

// Kind tells what a layer says about an extent.
type Kind uint32

// The kinds of extents. Units in no extent belong to the parent.
const (
	Data Kind = 1
	Zero Kind = 2
)

// Extent is a run of units of one kind.
type Extent struct {
	Unit  uint64
	Count uint64
	// Offset is where the data lies in the file, a multiple of the unit size; 0 if Kind is Zero.
	Offset int64
	Kind   Kind
	CRC    uint32 // CRC-32C of the data; 0 if Kind is Zero
}

// End is the first unit after e.
func (e Extent) End() uint64 { return e.Unit + e.Count }

// preamble is the header as it stands in the file.
type preamble struct {
	Header
	tableOffset int64
	extents     uint64
	fileBytes   int64
	tableCRC    uint32
}

func (p preamble) encode() []byte {
	b := make([]byte, headerLen)
	copy(b, magic)
	le := binary.LittleEndian
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], 0) // flags
	le.PutUint32(b[16:], p.UnitSize)
	le.PutUint64(b[24:], p.Units)
	le.PutUint64(b[32:], uint64(p.tableOffset))
	le.PutUint64(b[40:], p.extents)
	le.PutUint64(b[48:], uint64(p.fileBytes))
	le.PutUint32(b[56:], p.tableCRC)
	copy(b[72:reservedAt], p.Parent)
	le.PutUint32(b[headerCRC:], crc32.Checksum(b[:headerCRC], castagnoli))
	return b
}

// decodePreamble reads a header of headerLen bytes. The order of checks matters:
// another version may keep its checksum elsewhere.
func decodePreamble(b []byte) (preamble, error) {
	var p preamble
	le := binary.LittleEndian
	if string(b[:len(magic)]) != magic {
		return p, fmt.Errorf("first bytes are %q: %w", b[:len(magic)], ErrMagic)
	}
	if v := le.Uint32(b[8:]); v != version {
		return p, errdefs.WithHint(fmt.Errorf("version %d, this forkd reads %d: %w", v, version, ErrVersion),
			"use the forkd release that wrote it, or rebuild the snapshot")
	}
	if got, want := crc32.Checksum(b[:headerCRC], castagnoli), le.Uint32(b[headerCRC:]); got != want {
		return p, fmt.Errorf("header has CRC %08x, not %08x: %w", got, want, ErrChecksum)
	}
	if f := le.Uint32(b[12:]); f != 0 {
		return p, fmt.Errorf("unknown flags %#x: %w", f, ErrVersion)
	}
	if !allZero(b[20:24]) || !allZero(b[60:72]) || !allZero(b[reservedAt:headerCRC]) {
		return p, fmt.Errorf("reserved header bytes are not zero: %w", ErrTable)
	}
	parent, pad, _ := bytes.Cut(b[72:reservedAt], []byte{0})
	if !allZero(pad) {
		return p, fmt.Errorf("parent id is not padded with zeros: %w", ErrTable)
	}
	p.Header = Header{UnitSize: le.Uint32(b[16:]), Units: le.Uint64(b[24:]), Parent: string(parent)}
	if err := p.check(); err != nil {
		return p, fmt.Errorf("%w: %w", ErrTable, err)
	}
	p.tableOffset = int64(le.Uint64(b[32:]))
	p.extents = le.Uint64(b[40:])
	p.fileBytes = int64(le.Uint64(b[48:]))
	p.tableCRC = le.Uint32(b[56:])
	return p, p.checkLengths()
}

// checkLengths makes sure that no sum of the lengths can wrap.
func (p preamble) checkLengths() error {
	unit := int64(p.UnitSize)
	switch {
	case p.extents > MaxExtents || p.extents > p.Units:
		return fmt.Errorf("%d extents for %d units: %w", p.extents, p.Units, ErrTable)
	case p.tableOffset < unit || p.tableOffset%unit != 0 || p.tableOffset-unit > p.LogicalBytes():
		return fmt.Errorf("extent table at %d: %w", p.tableOffset, ErrTable)
	case p.fileBytes != p.tableOffset+int64(p.extents)*extentLen:
		return fmt.Errorf("file length %d does not follow from table at %d with %d extents: %w",
			p.fileBytes, p.tableOffset, p.extents, ErrTable)
	}
	return nil
}

func (e Extent) appendTo(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, e.Unit)
	b = le.AppendUint64(b, e.Count)
	b = le.AppendUint64(b, uint64(e.Offset))
	b = le.AppendUint32(b, uint32(e.Kind))
	return le.AppendUint32(b, e.CRC)
}

func decodeExtent(b []byte) Extent {
	le := binary.LittleEndian
	return Extent{
		Unit:   le.Uint64(b),
		Count:  le.Uint64(b[8:]),
		Offset: int64(le.Uint64(b[16:])),
		Kind:   Kind(le.Uint32(b[24:])),
		CRC:    le.Uint32(b[28:]),
	}
}

// zeros is read only.
var zeros [headerLen]byte

func allZero(b []byte) bool {
	for len(b) > len(zeros) {
		if !bytes.Equal(b[:len(zeros)], zeros[:]) {
			return false
		}
		b = b[len(zeros):]
	}
	return bytes.Equal(b, zeros[:len(b)])
}
