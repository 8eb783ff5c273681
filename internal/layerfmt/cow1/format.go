package cow1

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// Format is the name of this format in the list of a snapshot's artifacts.
const Format = "cow1"

// BlockSize is the unit of a disk in bytes.
const BlockSize = 4096

// MaxBlocks bounds a disk (4 TiB), so that no sum of offsets can wrap and a slot fits
// into an entry of the map.
const MaxBlocks = 1 << 30

const (
	magic      = "FORKDCOW"
	version    = 1
	flagSealed = 1
	headerLen  = 4096
	headerCRC  = headerLen - 4
	parentLen  = 24

	pageLen = 4096
	// pageEntries is how many blocks a page of the map describes; the rest of it is a trailer.
	pageEntries = 1020
	trailerAt   = 4 * pageEntries
)

// Entries of the map. Others are the number of a slot plus firstSlot.
const (
	entryAbsent = 0
	entryZero   = 1
	firstSlot   = 2
)

// What is wrong with a file that is no layer this build can read.
var (
	ErrMagic    = errdefs.As(errdefs.ErrCorrupt, errors.New("not a cow1 disk layer"))
	ErrSize     = errdefs.As(errdefs.ErrCorrupt, errors.New("disk layer is truncated or has a wrong size"))
	ErrChecksum = errdefs.As(errdefs.ErrCorrupt, errors.New("disk layer checksum does not match"))
	// ErrContent: the checksums match but the content contradicts itself.
	ErrContent = errdefs.As(errdefs.ErrCorrupt, errors.New("disk layer contradicts itself"))
	ErrVersion = errdefs.As(errdefs.ErrIncompatible, errors.New("disk layer version is not supported"))
	// ErrUnsealed: the file is an overlay that its machine never finished.
	ErrUnsealed = errdefs.As(errdefs.ErrNotReady, errors.New("disk layer is not sealed"))
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header says what a layer describes.
type Header struct {
	Blocks uint64 // length of the disk
	// Parent is the id of the snapshot whose disk shows through; "" if that is the image.
	Parent string
}

// Stats counts what a sealed layer holds.
type Stats struct {
	DataBlocks uint64
	ZeroBlocks uint64
	FileBytes  int64
}

func (h Header) check() error {
	if h.Blocks == 0 || h.Blocks > MaxBlocks {
		return fmt.Errorf("length of %d blocks is not between 1 and %d", h.Blocks, uint64(MaxBlocks))
	}
	// Only the form: what the id means is the manifest's business, and the VMM links
	// no regular expressions.
	odd := func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') }
	if len(h.Parent) > parentLen || strings.ContainsFunc(h.Parent, odd) {
		return fmt.Errorf("parent %.40q is not a snapshot id", h.Parent)
	}
	return nil
}

func (h Header) pages() uint64 { return (h.Blocks + pageEntries - 1) / pageEntries }

// pageOffset is where one of the two places of a page of the map lies.
func pageOffset(page uint64, place uint64) int64 {
	return headerLen + int64(2*page+place)*pageLen
}

// dataOffset is where slot 0 lies.
func (h Header) dataOffset() int64 { return pageOffset(h.pages(), 0) }

func (h Header) slotOffset(slot uint64) int64 { return h.dataOffset() + int64(slot)*BlockSize }

// preamble is the header as it stands in the file.
type preamble struct {
	Header
	sealed bool
	slots  uint64 // the rest is valid only if sealed
	data   uint64
	zero   uint64
}

func (p preamble) encode() []byte {
	b := make([]byte, headerLen)
	copy(b, magic)
	le := binary.LittleEndian
	le.PutUint32(b[8:], version)
	if p.sealed {
		le.PutUint32(b[12:], flagSealed)
		le.PutUint64(b[32:], p.slots)
		le.PutUint64(b[40:], p.data)
		le.PutUint64(b[48:], p.zero)
	}
	le.PutUint32(b[16:], BlockSize)
	le.PutUint64(b[24:], p.Blocks)
	copy(b[56:56+parentLen], p.Parent)
	le.PutUint32(b[headerCRC:], crc32.Checksum(b[:headerCRC], castagnoli))
	return b
}

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
	flags := le.Uint32(b[12:])
	if flags&^flagSealed != 0 {
		return p, fmt.Errorf("unknown flags %#x: %w", flags, ErrVersion)
	}
	if size := le.Uint32(b[16:]); size != BlockSize {
		return p, fmt.Errorf("block size %d: %w", size, ErrVersion)
	}
	parent, pad, _ := bytes.Cut(b[56:56+parentLen], []byte{0})
	if !allZero(b[20:24]) || !allZero(pad) || !allZero(b[56+parentLen:headerCRC]) {
		return p, fmt.Errorf("reserved header bytes are not zero: %w", ErrContent)
	}
	p.Header = Header{Blocks: le.Uint64(b[24:]), Parent: string(parent)}
	if err := p.check(); err != nil {
		return p, fmt.Errorf("%w: %w", ErrContent, err)
	}
	p.sealed = flags&flagSealed != 0
	p.slots, p.data, p.zero = le.Uint64(b[32:]), le.Uint64(b[40:]), le.Uint64(b[48:])
	if !p.sealed && (p.slots|p.data|p.zero) != 0 {
		return p, fmt.Errorf("counts in a layer that is not sealed: %w", ErrContent)
	}
	if p.slots > p.Blocks || p.data > p.slots || p.data+p.zero > p.Blocks {
		return p, fmt.Errorf("%d data and %d zero blocks of %d in %d slots: %w", p.data, p.zero, p.Blocks, p.slots, ErrContent)
	}
	return p, nil
}

// readHeader reads and checks the first page of a file of size bytes.
func readHeader(src interface {
	ReadAt([]byte, int64) (int, error)
}, size int64,
) (preamble, error) {
	if size < headerLen {
		return preamble{}, fmt.Errorf("%d bytes are less than a header: %w", size, ErrSize)
	}
	b := make([]byte, headerLen)
	if err := readFull(src, b, 0); err != nil {
		return preamble{}, err
	}
	return decodePreamble(b)
}

// page is a page of the map in memory.
type page struct {
	entries    [pageEntries]uint32
	generation uint64 // of the copy in the file; 0 if there is none
	dirty      bool
}

// encode fills b, one page, as copy number generation of page no.
func (p *page) encode(b []byte, no, generation uint64) {
	le := binary.LittleEndian
	for i, e := range p.entries {
		le.PutUint32(b[4*i:], e)
	}
	le.PutUint64(b[trailerAt:], generation)
	le.PutUint32(b[trailerAt+8:], uint32(no))
	le.PutUint32(b[pageLen-4:], crc32.Checksum(b[:pageLen-4], castagnoli))
}

// copyState tells what one of the two places of a page holds.
type copyState int

const (
	copyUnused copyState = iota // all zero
	copyValid
	copyDamaged
)

// inspectCopy looks at what stands in place (0 or 1) of page no.
func inspectCopy(b []byte, no, place uint64) (copyState, uint64) {
	le := binary.LittleEndian
	generation := le.Uint64(b[trailerAt:])
	if crc32.Checksum(b[:pageLen-4], castagnoli) == le.Uint32(b[pageLen-4:]) &&
		uint64(le.Uint32(b[trailerAt+8:])) == no && generation > 0 && generation&1 == place {
		return copyValid, generation
	}
	if allZero(b) {
		return copyUnused, 0
	}
	return copyDamaged, 0
}

// newest returns which of the two copies in b, both places of page no, counts: its bytes and
// generation, or nil if the page was never written. damaged tells that a place holds
// neither a copy nor nothing, as an interrupted write leaves it.
func newest(b []byte, no uint64) (content []byte, generation uint64, damaged bool) {
	for place := range uint64(2) {
		c := b[place*pageLen : (place+1)*pageLen]
		state, g := inspectCopy(c, no, place)
		switch {
		case state == copyDamaged:
			damaged = true
		case state == copyValid && g > generation:
			content, generation = c, g
		}
	}
	return content, generation, damaged
}

// decodeEntries checks the entries of page no against the limits of the disk. A slot below slots
// is allowed.
func decodeEntries(to *[pageEntries]uint32, b []byte, h Header, no, slots uint64) error {
	for i := range to {
		e := binary.LittleEndian.Uint32(b[4*i:])
		if e >= firstSlot && uint64(e-firstSlot) >= slots {
			return fmt.Errorf("block %d is in slot %d of %d: %w", no*pageEntries+uint64(i), e-firstSlot, slots, ErrContent)
		}
		if e != entryAbsent && no*pageEntries+uint64(i) >= h.Blocks {
			return fmt.Errorf("block %d of %d: %w", no*pageEntries+uint64(i), h.Blocks, ErrContent)
		}
		to[i] = e
	}
	return nil
}

// zeros is read only.
var zeros [BlockSize]byte

func allZero(b []byte) bool {
	for len(b) > len(zeros) {
		if !bytes.Equal(b[:len(zeros)], zeros[:]) {
			return false
		}
		b = b[len(zeros):]
	}
	return bytes.Equal(b, zeros[:len(b)])
}
