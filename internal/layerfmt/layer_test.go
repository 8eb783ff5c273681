package layerfmt

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

var update = flag.Bool("update", false, "write the golden files anew")

const parentID = "sn0123456789abcdefghij"

// memFile is a file in memory.
type memFile struct {
	b   []byte
	pos int64
}

func (m *memFile) Write(p []byte) (int, error) {
	if need := int(m.pos) + len(p); need > len(m.b) {
		m.b = append(m.b, make([]byte, need-len(m.b))...)
	}
	copy(m.b[m.pos:], p)
	m.pos += int64(len(p))
	return len(p), nil
}

func (m *memFile) Seek(off int64, whence int) (int64, error) {
	if whence != io.SeekStart {
		return 0, errors.New("only SeekStart")
	}
	m.pos = off
	return off, nil
}

// page returns a unit filled with b.
func page(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n*DefaultUnitSize) }

func write(t testing.TB, h Header, fill func(w *Writer) error) []byte {
	t.Helper()
	f := &memFile{}
	w, err := NewWriter(f, h)
	if err != nil {
		t.Fatal(err)
	}
	if err := fill(w); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if w.Stats().FileBytes != int64(len(f.b)) {
		t.Fatalf("stats say %d bytes, the file has %d", w.Stats().FileBytes, len(f.b))
	}
	return f.b
}

func mustOpen(t testing.TB, b []byte) *Reader {
	t.Helper()
	r, err := Open(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// sample has every kind of extent: joined, single, zero, at both ends.
func sample(w *Writer) error {
	mixed := append(append(page(3, 1), page(0, 2)...), page(4, 1)...)
	return errors.Join(
		w.Data(0, page(1, 1)), w.Data(1, page(2, 2)), // joined
		w.Zero(3, 2), w.Zero(5, 1), // joined
		w.Put(10, mixed),
		w.Data(15, page(0, 1)))
}

func sampleBytes(t testing.TB) []byte {
	return write(t, Header{Units: 16, Parent: parentID}, sample)
}

func TestRoundTrip(t *testing.T) {
	b := sampleBytes(t)
	r := mustOpen(t, b)
	if h := r.Header(); h != (Header{UnitSize: 4096, Units: 16, Parent: parentID}) {
		t.Errorf("header %+v", h)
	}
	want := []Extent{
		{Unit: 0, Count: 3, Offset: 4096, Kind: Data},
		{Unit: 3, Count: 3, Kind: Zero},
		{Unit: 10, Count: 1, Offset: 4 * 4096, Kind: Data},
		{Unit: 11, Count: 2, Kind: Zero},
		{Unit: 13, Count: 1, Offset: 5 * 4096, Kind: Data},
		{Unit: 15, Count: 1, Offset: 6 * 4096, Kind: Data},
	}
	got := r.Extents()
	if len(got) != len(want) {
		t.Fatalf("extents %+v", got)
	}
	for i, e := range got {
		if e.CRC = 0; e != want[i] {
			t.Errorf("extent %d is %+v, want %+v", i, e, want[i])
		}
	}
	if s := r.Stats(); s != (Stats{Extents: 6, DataUnits: 6, ZeroUnits: 5, FileBytes: int64(len(b))}) {
		t.Errorf("stats %+v", s)
	}
	if err := r.Verify(context.Background()); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.Verify(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled verify: %v", err)
	}
}

func TestEmptyAndLargeUnits(t *testing.T) {
	if r := mustOpen(t, write(t, Header{Units: 1}, func(*Writer) error { return nil })); len(r.Extents()) != 0 {
		t.Error("empty layer has extents")
	}
	b := write(t, Header{Units: 4, UnitSize: 8192}, func(w *Writer) error { return w.Data(2, page(7, 2)) })
	r := mustOpen(t, b)
	if e := r.Extents()[0]; e.Offset != 8192 || e.Unit != 2 || e.Count != 1 {
		t.Errorf("extent %+v", e)
	}
}

func TestWriterRefuses(t *testing.T) {
	for name, h := range map[string]Header{
		"no units":   {},
		"unit size":  {Units: 1, UnitSize: 5000},
		"tiny unit":  {Units: 1, UnitSize: 512},
		"too long":   {Units: 1 << 60},
		"bad parent": {Units: 1, Parent: "../../etc"},
		"image":      {Units: 1, Parent: "im0123456789abcdefghij"},
	} {
		if _, err := NewWriter(&memFile{}, h); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, fill := range map[string]func(w *Writer) error{
		"backwards": func(w *Writer) error { return errors.Join(w.Zero(2, 2), w.Data(3, page(1, 1))) },
		"outside":   func(w *Writer) error { return w.Data(15, page(1, 2)) },
		"overflow":  func(w *Writer) error { return w.Zero(1, ^uint64(0)) },
		"uneven":    func(w *Writer) error { return w.Data(0, []byte("x")) },
		"uneven put": func(w *Writer) error {
			return w.Put(0, append(page(1, 1), 'x'))
		},
	} {
		w, err := NewWriter(&memFile{}, Header{Units: 16})
		if err != nil {
			t.Fatal(err)
		}
		if err := fill(w); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		if err := w.Close(); err == nil {
			t.Errorf("%s: Close of a failed writer succeeded", name)
		}
	}
}

// rehash makes a changed layer consistent again, as an attacker would.
func rehash(b []byte) []byte {
	le := binary.LittleEndian
	if table := le.Uint64(b[32:]); table < uint64(len(b)) {
		le.PutUint32(b[56:], crc32.Checksum(b[table:], castagnoli))
	}
	le.PutUint32(b[headerCRC:], crc32.Checksum(b[:headerCRC], castagnoli))
	return b
}

func TestDamage(t *testing.T) {
	le := binary.LittleEndian
	table := func(b []byte, i int) []byte { return b[le.Uint64(b[32:])+uint64(i)*extentLen:] }
	for name, c := range map[string]struct {
		want   error
		damage func(b []byte) []byte
	}{
		"empty":          {ErrSize, func([]byte) []byte { return nil }},
		"short header":   {ErrSize, func(b []byte) []byte { return b[:100] }},
		"short text":     {ErrMagic, func([]byte) []byte { return []byte("#!/bin/sh\n") }},
		"crashed writer": {ErrMagic, func(b []byte) []byte { clear(b[:headerLen]); return b }},
		"magic":          {ErrMagic, func(b []byte) []byte { b[0]++; return b }},
		"version":        {ErrVersion, func(b []byte) []byte { b[8]++; return b }},
		"flags":          {ErrVersion, func(b []byte) []byte { b[12] = 1; return rehash(b) }},
		"header bit":     {ErrChecksum, func(b []byte) []byte { b[25] ^= 1; return b }},
		"table bit":      {ErrChecksum, func(b []byte) []byte { b[len(b)-1] ^= 1; return b }},
		"truncated":      {ErrSize, func(b []byte) []byte { return b[:len(b)-1] }},
		"extended":       {ErrSize, func(b []byte) []byte { return append(b, 0) }},
		"reserved":       {ErrTable, func(b []byte) []byte { b[200] = 1; return rehash(b) }},
		"parent":         {ErrTable, func(b []byte) []byte { b[72] = '/'; return rehash(b) }},
		"parent padding": {ErrTable, func(b []byte) []byte { b[73], b[74] = 0, 1; return rehash(b) }},
		"table wraps":    {ErrTable, func(b []byte) []byte { le.PutUint64(b[32:], 1<<63+4096); return rehash(b) }},
		"many extents":   {ErrTable, func(b []byte) []byte { le.PutUint64(b[40:], 1<<59); return rehash(b) }},
		"huge logical":   {ErrTable, func(b []byte) []byte { le.PutUint64(b[24:], 1<<52); return rehash(b) }},
		"overlap":        {ErrTable, func(b []byte) []byte { le.PutUint64(table(b, 1), 2); return rehash(b) }},
		"beyond end":     {ErrTable, func(b []byte) []byte { le.PutUint64(table(b, 5)[8:], 2); return rehash(b) }},
		"count wraps":    {ErrTable, func(b []byte) []byte { le.PutUint64(table(b, 5)[8:], ^uint64(0)); return rehash(b) }},
		"no count":       {ErrTable, func(b []byte) []byte { le.PutUint64(table(b, 1)[8:], 0); return rehash(b) }},
		"shared data":    {ErrTable, func(b []byte) []byte { le.PutUint64(table(b, 2)[16:], 4096); return rehash(b) }},
		"unknown kind":   {ErrTable, func(b []byte) []byte { table(b, 1)[24] = 9; return rehash(b) }},
		"zero with data": {ErrTable, func(b []byte) []byte { table(b, 1)[28] = 9; return rehash(b) }},
		"lost data": {ErrTable, func(b []byte) []byte {
			copy(table(b, 5)[16:28], make([]byte, 8))
			table(b, 5)[24] = 2
			return rehash(b)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := c.damage(sampleBytes(t))
			_, err := Open(bytes.NewReader(b), int64(len(b)))
			if !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
			class := errdefs.ErrCorrupt
			if errors.Is(c.want, ErrVersion) {
				class = errdefs.ErrIncompatible
			}
			if got := errdefs.Class(err); !errors.Is(got, class) {
				t.Errorf("class is %v", got)
			}
		})
	}
}

func TestVerifyFindsDamagedData(t *testing.T) {
	b := sampleBytes(t)
	b[5*4096+17] ^= 0x40
	if err := mustOpen(t, b).Verify(context.Background()); !errors.Is(err, ErrChecksum) {
		t.Errorf("got %v", err)
	}
	// A source that became shorter after Open.
	b = sampleBytes(t)
	r := mustOpen(t, b)
	r.src = bytes.NewReader(b[:4*4096])
	if err := r.Verify(context.Background()); !errors.Is(err, ErrSize) {
		t.Errorf("got %v", err)
	}
	if _, err := Open(bytes.NewReader(nil), -1); !errors.Is(err, ErrSize) {
		t.Errorf("negative size: %v", err)
	}
}

// TestGoldenV1 fixes the bytes of version 1 in both directions.
func TestGoldenV1(t *testing.T) {
	path := filepath.Join("testdata", "v1.layer")
	made := sampleBytes(t)
	if *update {
		if err := os.WriteFile(path, made, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := mustOpen(t, golden).Verify(context.Background()); err != nil {
		t.Errorf("golden file: %v", err)
	}
	if !bytes.Equal(golden, made) {
		t.Error("the writer makes other bytes than the golden file: this needs a new version")
	}
}

func FuzzOpen(f *testing.F) {
	b := sampleBytes(f)
	f.Add(b)
	f.Add(b[:headerLen])
	f.Add([]byte{})
	f.Add(write(f, Header{Units: 3}, func(w *Writer) error { return w.Zero(1, 1) }))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= headerLen {
			rehash(b) // or the fuzzer never gets past the checksums
		}
		r, err := Open(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			if c := errdefs.Class(err); !errors.Is(c, errdefs.ErrCorrupt) && !errors.Is(c, errdefs.ErrIncompatible) {
				t.Fatalf("class %v of %v", c, err)
			}
			return
		}
		for _, e := range r.Extents() {
			if e.Kind == Data && (e.Offset < headerLen || e.Offset+int64(e.Count)*int64(r.header.UnitSize) > int64(len(b))) {
				t.Fatalf("extent %+v points outside of %d bytes", e, len(b))
			}
		}
		if err := r.Verify(context.Background()); err != nil && !errors.Is(err, ErrChecksum) {
			t.Fatal(err)
		}
		if r.header.Parent == "" {
			ranges, err := Plan([]*Reader{r})
			if err != nil {
				t.Fatal(err)
			}
			var units uint64
			for _, x := range ranges {
				units += x.Count
			}
			if units != r.header.Units {
				t.Fatalf("plan covers %d of %d units", units, r.header.Units)
			}
		}
	})
}
