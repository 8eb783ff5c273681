package cow1

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the golden file anew")

const goldenFile = "testdata/v1.cow1"

// goldenLayer: blocks 1, 2 and 1021 hold data, 5 to 7 are zero, in a disk of two map pages.
func goldenLayer(t *testing.T) []byte {
	t.Helper()
	f := &volatileFile{}
	o, err := Create(f, Header{Blocks: pageEntries + 5, Parent: "sn0123456789abcdefghij"}, SyncProcess)
	if err != nil {
		t.Fatal(err)
	}
	d, err := NewDisk(Chain{Top: o})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []int64{1, 2, pageEntries + 1} {
		if err := d.WriteAt(bytes.Repeat([]byte{byte('a' + b%26)}, BlockSize), b*BlockSize); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Zero(5*BlockSize, 3*BlockSize); err != nil {
		t.Fatal(err)
	}
	if err := o.Seal(); err != nil {
		t.Fatal(err)
	}
	return f.now
}

func TestGolden(t *testing.T) {
	got := goldenLayer(t)
	if *update {
		if err := os.MkdirAll(filepath.Dir(goldenFile), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(goldenFile, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(goldenFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the bytes of version 1 have changed")
	}
	l, err := Open(bytes.NewReader(want), int64(len(want)))
	if err != nil {
		t.Fatal(err)
	}
	if s := l.Stats(); s.DataBlocks != 3 || s.ZeroBlocks != 3 || l.Header().Parent != "sn0123456789abcdefghij" {
		t.Fatalf("%+v %+v", s, l.Header())
	}
	if err := l.Verify(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// TestDamage: every flipped bit of header and map is found, by Open or by Verify.
func TestDamage(t *testing.T) {
	good := goldenLayer(t)
	end := Header{Blocks: pageEntries + 5}.dataOffset()
	for off := int64(0); off < end; off += 5 {
		bad := bytes.Clone(good)
		bad[off] ^= 0x10
		l, err := Open(bytes.NewReader(bad), int64(len(bad)))
		if err == nil {
			err = l.Verify(context.Background())
		}
		if err == nil {
			t.Fatalf("damage at %d was not found", off)
		}
	}
	for _, n := range []int{0, 10, headerLen, len(good) - 1} {
		if _, err := Open(bytes.NewReader(good[:n]), int64(n)); !errors.Is(err, ErrSize) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func TestUnsealedIsNoLayer(t *testing.T) {
	f := &volatileFile{}
	if _, err := Create(f, Header{Blocks: 10}, SyncHost); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(f, f.size()); !errors.Is(err, ErrUnsealed) {
		t.Fatalf("got %v", err)
	}
}

// FuzzOpen: whatever the file holds, opening, verifying, reading and recovering it neither
// panics nor reads outside of it. The input is a list of changes (offset, word) of the golden file,
// which keeps it small, and its length; checksums are made right if seal is set.
func FuzzOpen(f *testing.F) {
	good, err := os.ReadFile(goldenFile)
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte{}, uint16(len(good)), true)
	f.Add([]byte{24, 0, 1, 0, 0, 0}, uint16(len(good)), true)
	f.Add([]byte{12, 0, 0, 0, 0, 0, 32, 0, 0, 0, 0, 0, 40, 0, 0, 0, 0, 0, 48, 0, 0, 0, 0, 0}, uint16(headerLen), true)
	f.Add([]byte{0, 32, 9, 0, 0, 0}, uint16(len(good)), false)
	f.Fuzz(func(t *testing.T, changes []byte, size uint16, seal bool) {
		b := bytes.Clone(good[:min(len(good), int(size))])
		for c := changes; len(c) >= 6; c = c[6:] {
			if at := int(le.Uint16(c)); at+4 <= len(b) {
				copy(b[at:], c[2:6])
			}
		}
		if seal {
			reseal(b)
		}
		file := &volatileFile{now: b, limit: 1 << 20}
		if l, err := Open(file, file.size()); err == nil {
			whole := l.Verify(context.Background()) == nil
			walk(t, l, whole)
		}
		if o, err := Recover(file, file.size(), SyncHost); err == nil {
			if err := o.Seal(); err != nil {
				t.Fatalf("seal: %v", err)
			}
			l, err := o.AsLayer()
			if err != nil {
				t.Fatalf("a recovered layer does not open: %v", err)
			}
			if l.p.Blocks < 1<<16 {
				if err := l.Verify(context.Background()); err != nil {
					t.Fatalf("a recovered layer is damaged: %v", err)
				}
			}
		}
	})
}

// walk reads the disk through the layer.
func walk(t *testing.T, l *Layer, whole bool) {
	h := l.Header()
	for block := uint64(0); block < min(h.Blocks, 1<<14); {
		r, err := l.Find(block, h.Blocks-block)
		if err != nil {
			if whole {
				t.Fatalf("verified layer fails at block %d: %v", block, err)
			}
			return
		}
		if r.Count == 0 || r.Count > h.Blocks-block {
			t.Fatalf("run of %d at %d of %d", r.Count, block, h.Blocks)
		}
		if end := r.Offset + int64(r.Count)*BlockSize; r.Kind == Data && (r.Offset < h.dataOffset() || end > l.Stats().FileBytes) {
			t.Fatalf("run at %d ends at %d", r.Offset, end)
		}
		block += r.Count
	}
}

// reseal makes the checksums of header and map right, so that the fuzzer gets behind them.
func reseal(b []byte) {
	for off := 0; off+pageLen <= min(len(b), 5*pageLen); off += pageLen {
		if !allZero(b[off : off+pageLen]) {
			le.PutUint32(b[off+pageLen-4:], crc(b[off:off+pageLen-4]))
		}
	}
}
