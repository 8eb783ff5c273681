package cow1

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
)

const sector = 512

// volatileFile is a file in memory on a disk with a write cache: what was not synced when
// the power goes may have arrived sector by sector, in any order.
type volatileFile struct {
	now     []byte // what readers see
	durable []byte
	pending []pendingSector
	fail    func() error // asked before each write
	limit   int64        // of the length; 0: none
}

type pendingSector struct {
	off  int64
	data []byte
}

func (f *volatileFile) ReadAt(p []byte, off int64) (int, error) {
	if off >= int64(len(f.now)) {
		return 0, io.EOF
	}
	n := copy(p, f.now[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *volatileFile) WriteAt(p []byte, off int64) (int, error) {
	if f.fail != nil {
		if err := f.fail(); err != nil {
			return 0, err
		}
	}
	if end := off + int64(len(p)); end > int64(len(f.now)) {
		f.now = append(f.now, make([]byte, end-int64(len(f.now)))...)
	}
	copy(f.now[off:], p)
	for i := 0; i < len(p); i += sector {
		s := p[i:min(i+sector, len(p))]
		f.pending = append(f.pending, pendingSector{off + int64(i), slices.Clone(s)})
	}
	return len(p), nil
}

func (f *volatileFile) PunchHole(off, n int64) error {
	n = min(n, int64(len(f.now))-off)
	if n <= 0 {
		return nil
	}
	_, err := f.WriteAt(make([]byte, n), off)
	return err
}

func (f *volatileFile) Truncate(n int64) error {
	if f.limit > 0 && n > f.limit {
		return errors.New("no space left")
	}
	resize := func(b []byte) []byte {
		if n <= int64(len(b)) {
			return b[:n]
		}
		return append(b, make([]byte, n-int64(len(b)))...)
	}
	f.now, f.durable = resize(f.now), resize(f.durable)
	return nil
}

func (f *volatileFile) Sync() error {
	f.durable = slices.Clone(f.now)
	f.pending = f.pending[:0]
	return nil
}

func (f *volatileFile) size() int64 { return int64(len(f.now)) }

// losePower returns what is on the disk afterwards.
func (f *volatileFile) losePower(r *rand.Rand) *volatileFile {
	b := slices.Clone(f.durable)
	order := r.Perm(len(f.pending))
	for _, i := range order[:r.IntN(len(order)+1)] {
		p := f.pending[i]
		if end := p.off + int64(len(p.data)); end > int64(len(b)) {
			b = append(b, make([]byte, end-int64(len(b)))...)
		}
		copy(b[p.off:], p.data)
	}
	return &volatileFile{now: b, durable: slices.Clone(b)}
}

// killed returns what is in the file after the process ended.
func (f *volatileFile) killed() *volatileFile {
	return &volatileFile{now: slices.Clone(f.now), durable: slices.Clone(f.now)}
}

// fill makes sectors that hold nothing but one number.
func fill(value uint64, sectors int) []byte {
	b := make([]byte, 0, sectors*sector)
	for range sectors * sector / 8 {
		b = binary.LittleEndian.AppendUint64(b, value)
	}
	return b
}

// values reads the numbers of sectors back; a sector of mixed content fails the test.
func values(t *testing.T, b []byte) []uint64 {
	t.Helper()
	var v []uint64
	for i := 0; i < len(b); i += sector {
		first := binary.LittleEndian.Uint64(b[i:])
		for j := 8; j < sector; j += 8 {
			if got := binary.LittleEndian.Uint64(b[i+j:]); got != first {
				t.Fatalf("sector %d holds %d and %d", i/sector, first, got)
			}
		}
		v = append(v, first)
	}
	return v
}

var le = binary.LittleEndian

func crc(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }
