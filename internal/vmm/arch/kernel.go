package arch

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/memory"
)

// File is what a kernel or initial RAM disk is read from.
type File struct {
	io.ReaderAt
	Bytes int64
}

// protocol is how a kernel is entered.
type protocol int

const (
	protocolLinux64 protocol = iota
	protocolPVH
)

// image is a kernel in guest memory.
type image struct {
	protocol protocol
	entry    uint64
	end      memory.Address // first free address after it
	header   []byte         // setup header of a bzImage from setupHeader on, or nil
}

// Fields of the x86 boot protocol (Documentation/arch/x86/boot.rst).
const (
	setupHeader      = 0x1f1
	setupSects       = 0x1f1
	bootFlagAt       = 0x1fe
	bootFlag         = 0xaa55
	jumpLength       = 0x201
	headerMagicAt    = 0x202
	headerMagic      = 0x53726448 // "HdrS"
	versionAt        = 0x206
	loaderTypeAt     = 0x210
	loadFlagsAt      = 0x211
	ramdiskImageAt   = 0x218
	ramdiskSizeAt    = 0x21c
	cmdlinePointerAt = 0x228
	alignmentAt      = 0x230
	relocatableAt    = 0x234
	xLoadFlagsAt     = 0x236
	prefAddressAt    = 0x258
	initSizeAt       = 0x260
	setupEnd         = 0x290 // as far as we copy
	xLoadKernel64    = 1 << 0
	version2_12      = 0x20c
	entry64Offset    = 0x200
	sectorLen        = 512
	loaderUndefined  = 0xff
	maxKernelBytes   = 1 << 30
)

// loadKernel puts a kernel into guest memory, whatever its format. usePVH asks for the PVH
// entry of an ELF file that has both.
func loadKernel(g memory.Guest, f File, usePVH bool) (image, error) {
	head := make([]byte, setupEnd)
	if f.Bytes < int64(len(head)) || f.Bytes > maxKernelBytes {
		return image{}, errdefs.New(errdefs.ErrInvalid, "load kernel: it has %d bytes", f.Bytes)
	}
	if _, err := f.ReadAt(head, 0); err != nil {
		return image{}, fmt.Errorf("load kernel: %w", err)
	}
	switch {
	case bytes.HasPrefix(head, []byte(elfMagic)):
		return loadELF(g, f, usePVH)
	case binary.LittleEndian.Uint32(head[headerMagicAt:]) == headerMagic:
		return loadBzImage(g, f, head)
	}
	return image{}, errdefs.New(errdefs.ErrInvalid, "load kernel: it is neither an ELF file nor a bzImage")
}

// Fields of ELF files (System V ABI, chapters 4 and 5). Both classes are little-endian
// here; a 32-bit file has narrower fields at other places.
const (
	elfMagic         = "\x7fELF"
	elfClass64       = 2
	elfLittleEndian  = 1
	elfX86           = 3
	elfX86_64        = 62
	elfLoad          = 1
	elfNote          = 4
	maxSegments      = 64
	maxNoteBytes     = 1 << 16
	elfHeader64      = 64
	notePhysicalPVH  = 18
	noteOwnerPVH     = "Xen\x00"
	noteHeaderLen    = 12
	segmentLen64     = 56
	segmentLen32     = 32
	unknownEntryPVH  = 0
	noteWideEntryLen = 8
)

// segment is a program header.
type segment struct {
	kind                           uint32
	offset, address, filesz, memsz uint64
}

// parseELF reads entry point and program headers.
func parseELF(f File) (entry uint64, wide bool, segments []segment, err error) {
	le := binary.LittleEndian
	h := make([]byte, elfHeader64)
	if _, err := f.ReadAt(h, 0); err != nil {
		return 0, false, nil, fmt.Errorf("load kernel: %w", err)
	}
	wide = h[4] == elfClass64
	if m := le.Uint16(h[18:]); h[5] != elfLittleEndian || (m != elfX86_64 && m != elfX86) {
		return 0, false, nil, errdefs.New(errdefs.ErrInvalid, "load kernel: an ELF file for machine %d", m)
	}
	table, size, count := uint64(le.Uint32(h[28:])), uint64(segmentLen32), le.Uint16(h[44:])
	entry = uint64(le.Uint32(h[24:]))
	if wide {
		table, size, count = le.Uint64(h[32:]), segmentLen64, le.Uint16(h[56:])
		entry = le.Uint64(h[24:])
	}
	if count > maxSegments || table > uint64(f.Bytes) || size*uint64(count) > uint64(f.Bytes)-table {
		return 0, false, nil, errdefs.New(errdefs.ErrInvalid, "load kernel: %d program headers at %d", count, table)
	}
	b := make([]byte, size*uint64(count))
	if _, err := f.ReadAt(b, int64(table)); err != nil {
		return 0, false, nil, fmt.Errorf("load kernel: %w", err)
	}
	for ; len(b) > 0; b = b[size:] {
		s := segment{kind: le.Uint32(b)}
		if wide {
			s.offset, s.address, s.filesz, s.memsz = le.Uint64(b[8:]), le.Uint64(b[24:]), le.Uint64(b[32:]), le.Uint64(b[40:])
		} else {
			s.offset, s.address = uint64(le.Uint32(b[4:])), uint64(le.Uint32(b[12:]))
			s.filesz, s.memsz = uint64(le.Uint32(b[16:])), uint64(le.Uint32(b[20:]))
		}
		segments = append(segments, s)
	}
	return entry, wide, segments, nil
}

func loadELF(g memory.Guest, f File, usePVH bool) (image, error) {
	entry, wide, segments, err := parseELF(f)
	if err != nil {
		return image{}, err
	}
	img := image{entry: entry}
	pvh := uint64(unknownEntryPVH)
	for _, s := range segments {
		switch s.kind {
		case elfLoad:
			if err := loadSegment(g, f, s); err != nil {
				return image{}, err
			}
			img.end = max(img.end, memory.Address(s.address+s.memsz))
		case elfNote:
			if v := pvhEntry(f, s); v != unknownEntryPVH {
				pvh = v
			}
		}
	}
	if pvh != unknownEntryPVH && (usePVH || !wide) {
		img.protocol, img.entry = protocolPVH, pvh
		return img, nil
	}
	if !wide || usePVH {
		return image{}, errdefs.New(errdefs.ErrInvalid, "load kernel: it has no PVH entry")
	}
	return img, nil
}

func loadSegment(g memory.Guest, f File, s segment) error {
	if s.memsz == 0 {
		return nil
	}
	if s.filesz > s.memsz || s.offset > uint64(f.Bytes) || s.filesz > uint64(f.Bytes)-s.offset {
		return errdefs.New(errdefs.ErrInvalid, "load kernel: a segment of %d bytes at %d lies outside of the file", s.filesz, s.offset)
	}
	if s.address < uint64(highMemoryStart) {
		return errdefs.New(errdefs.ErrInvalid, "load kernel: a segment at %#x lies below 1 MiB", s.address)
	}
	at, err := g.Slice(memory.Address(s.address), s.memsz)
	if err != nil {
		return fmt.Errorf("load kernel: %w", err)
	}
	if s.filesz == 0 {
		return nil
	}
	if _, err := f.ReadAt(at[:s.filesz], int64(s.offset)); err != nil {
		return fmt.Errorf("load kernel: %w", err)
	}
	return nil
}

// pvhEntry finds the entry point of the PVH protocol in a segment of notes.
func pvhEntry(f File, s segment) uint64 {
	if s.filesz > maxNoteBytes || s.offset > uint64(f.Bytes) || s.filesz > uint64(f.Bytes)-s.offset {
		return unknownEntryPVH
	}
	b := make([]byte, s.filesz)
	if _, err := f.ReadAt(b, int64(s.offset)); err != nil {
		return unknownEntryPVH
	}
	le := binary.LittleEndian
	for len(b) >= noteHeaderLen {
		nameLen, descLen, kind := uint64(le.Uint32(b)), uint64(le.Uint32(b[4:])), le.Uint32(b[8:])
		b = b[noteHeaderLen:]
		name, desc := (nameLen+3)&^3, (descLen+3)&^3
		if name+desc > uint64(len(b)) {
			return unknownEntryPVH
		}
		if kind == notePhysicalPVH && string(b[:nameLen]) == noteOwnerPVH && descLen >= 4 {
			if descLen >= noteWideEntryLen {
				return le.Uint64(b[name:])
			}
			return uint64(le.Uint32(b[name:]))
		}
		b = b[name+desc:]
	}
	return unknownEntryPVH
}

func loadBzImage(g memory.Guest, f File, head []byte) (image, error) {
	le := binary.LittleEndian
	if le.Uint16(head[versionAt:]) < version2_12 || le.Uint16(head[xLoadFlagsAt:])&xLoadKernel64 == 0 {
		return image{}, errdefs.New(errdefs.ErrInvalid, "load kernel: the bzImage has no 64-bit entry")
	}
	sects := int64(head[setupSects])
	if sects == 0 {
		sects = 4
	}
	offset := (sects + 1) * sectorLen
	if offset >= f.Bytes {
		return image{}, errdefs.New(errdefs.ErrInvalid, "load kernel: the bzImage ends at %d", f.Bytes)
	}
	load := memory.Address(le.Uint64(head[prefAddressAt:]))
	if load < highMemoryStart {
		return image{}, errdefs.New(errdefs.ErrInvalid, "load kernel: the bzImage wants to lie at %#x", uint64(load))
	}
	need := max(uint64(le.Uint32(head[initSizeAt:])), uint64(f.Bytes-offset))
	if _, err := g.Slice(load, need); err != nil {
		return image{}, fmt.Errorf("load kernel: %w", err)
	}
	at, err := g.Slice(load, uint64(f.Bytes-offset))
	if err != nil {
		return image{}, fmt.Errorf("load kernel: %w", err)
	}
	if _, err := f.ReadAt(at, offset); err != nil {
		return image{}, fmt.Errorf("load kernel: %w", err)
	}
	end := min(headerMagicAt+int(head[jumpLength]), setupEnd)
	return image{entry: uint64(load) + entry64Offset, end: load + memory.Address(need), header: head[setupHeader:end]}, nil
}
