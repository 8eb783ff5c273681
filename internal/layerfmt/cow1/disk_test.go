package cow1

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
)

const (
	testBlocks     = 2*pageEntries + 37
	testSectors    = testBlocks * BlockSize / sector
	testBaseSector = (pageEntries+11)*8 + 3 // the image ends inside of a block
)

// world is a disk and what it must hold.
type world struct {
	t       *testing.T
	r       *rand.Rand
	base    *volatileFile
	sealed  []*volatileFile // root first
	top     *volatileFile
	mode    Durability
	disk    *Disk
	want    []uint64   // by sector
	flushed []uint64   // what Flush promised
	since   [][]uint64 // what else each sector was since
	next    uint64
}

func newWorld(t *testing.T, seed uint64, mode Durability) *world {
	w := &world{t: t, r: rand.New(rand.NewPCG(seed, 7)), mode: mode, base: &volatileFile{}, want: make([]uint64, testSectors), next: 1}
	for s := range testBaseSector {
		w.want[s] = w.number()
		w.base.now = append(w.base.now, fill(w.want[s], 1)...)
	}
	w.top = &volatileFile{}
	o, err := Create(w.top, Header{Blocks: testBlocks}, mode)
	if err != nil {
		t.Fatal(err)
	}
	w.assemble(o)
	w.promise()
	return w
}

func (w *world) number() uint64 { w.next++; return w.next }

func (w *world) assemble(o *Overlay) {
	var layers []*Layer
	for _, f := range w.sealed {
		l, err := Open(f, f.size())
		if err != nil {
			w.t.Fatal(err)
		}
		layers = append(layers, l)
	}
	d, err := NewDisk(Chain{Top: o, Layers: layers, Base: w.base, BaseBytes: w.base.size()})
	if err != nil {
		w.t.Fatal(err)
	}
	w.disk = d
}

func (w *world) promise() {
	w.flushed = slices.Clone(w.want)
	w.since = make([][]uint64, testSectors)
}

func (w *world) set(s int, v uint64) {
	w.want[s] = v
	w.since[s] = append(w.since[s], v)
}

func (w *world) check(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// extent draws a range of sectors, half of them whole blocks, most of them short.
func (w *world) extent() (from, n int) {
	limit := []int{8, 64, 512, testSectors}[w.r.IntN(4)]
	if w.r.IntN(40) > 0 {
		limit = min(limit, 512)
	}
	n = 1 + w.r.IntN(limit)
	from = w.r.IntN(testSectors - n + 1)
	if w.r.IntN(2) == 0 {
		from, n = from/8*8, (n+7)/8*8
		n = min(n, testSectors-from)
	}
	return from, n
}

func (w *world) step() {
	switch op := w.r.IntN(100); {
	case op < 45:
		w.write()
	case op < 70:
		from, n := w.extent()
		b := make([]byte, n*sector)
		w.check(w.disk.ReadAt(b, int64(from)*sector))
		if got := values(w.t, b); !slices.Equal(got, w.want[from:from+n]) {
			w.t.Fatalf("sectors %d+%d differ", from, n)
		}
	case op < 78:
		from, n := w.extent()
		w.check(w.disk.Zero(int64(from)*sector, int64(n)*sector))
		for s := from; s < from+n; s++ {
			w.set(s, 0)
		}
	case op < 86:
		from, n := w.extent()
		w.check(w.disk.Discard(int64(from)*sector, int64(n)*sector))
		for s := (from + 7) / 8 * 8; s < (from+n)/8*8; s++ {
			w.set(s, 0)
		}
	case op < 93:
		w.check(w.disk.Flush())
		w.promise()
	case op < 95:
		w.freeze()
	case op < 96:
		w.merge()
	default:
		w.crash()
	}
}

func (w *world) write() {
	from, n := w.extent()
	n = min(n, 2048)
	var b []byte
	for s := from; s < from+n; s++ {
		w.set(s, w.number())
		b = append(b, fill(w.want[s], 1)...)
	}
	w.check(w.disk.WriteAt(b, int64(from)*sector))
}

func (w *world) freeze() {
	next := &volatileFile{}
	o, err := Create(next, Header{Blocks: testBlocks, Parent: "sn0123456789abcdefghij"}, w.mode)
	w.check(err)
	w.check(w.disk.Freeze(o))
	w.check(w.top.Sync()) // publishing does
	w.sealed = append(w.sealed, w.top)
	l, err := Open(w.top, w.top.size())
	w.check(err)
	w.check(l.Verify(context.Background()))
	w.top = next
	w.promise()
}

// merge replaces the layers by one that says the same.
func (w *world) merge() {
	var layers []*Layer
	for _, f := range w.sealed {
		l, err := Open(f, f.size())
		w.check(err)
		layers = append(layers, l)
	}
	f := &volatileFile{}
	stats, err := Merge(context.Background(), f, Header{Blocks: testBlocks}, layers)
	w.check(err)
	if stats.FileBytes != f.size() {
		w.t.Fatalf("merged file has %d bytes, stats say %d", f.size(), stats.FileBytes)
	}
	l, err := Open(f, f.size())
	w.check(err)
	w.check(l.Verify(context.Background()))
	w.sealed = []*volatileFile{f}
	w.assemble(w.disk.Overlay())
}

// crash recovers the overlay and takes for true whatever is allowed.
func (w *world) crash() {
	if w.r.IntN(2) == 0 {
		w.brokenFlush()
	}
	f := w.top.killed()
	if w.mode == SyncHost && w.r.IntN(2) == 0 {
		f = w.top.losePower(w.r)
	}
	if w.r.IntN(4) == 0 {
		// A machine that never came to its first flush has no overlay to recover.
		if _, err := readHeader(f, f.size()); err != nil {
			return
		}
	}
	o, err := Recover(f, f.size(), w.mode)
	if err != nil && errors.Is(err, ErrMagic) && len(w.top.durable) == 0 {
		return
	}
	if err != nil && !w.headerDurable() {
		return
	}
	w.check(err)
	w.top = f
	w.assemble(o)
	b := make([]byte, testSectors*sector)
	w.check(w.disk.ReadAt(b, 0))
	got := values(w.t, b)
	for s, v := range got {
		if v != w.flushed[s] && !slices.Contains(w.since[s], v) {
			w.t.Fatalf("sector %d is %d after a crash, was %d at the last flush and then %v", s, v, w.flushed[s], w.since[s])
		}
	}
	w.want = got
	w.promise()
}

// brokenFlush ends in the middle.
func (w *world) brokenFlush() {
	left := w.r.IntN(4)
	w.top.fail = func() error {
		if left--; left < 0 {
			return errors.New("the process is dead")
		}
		return nil
	}
	if w.disk.Flush() == nil {
		w.promise()
	}
	w.top.fail = nil
}

// headerDurable tells whether the header of the overlay was ever synced.
func (w *world) headerDurable() bool {
	return len(w.top.durable) >= headerLen && string(w.top.durable[:len(magic)]) == magic
}

func (w *world) verifyAll() {
	b := make([]byte, testSectors*sector)
	w.check(w.disk.ReadAt(b, 0))
	if !slices.Equal(values(w.t, b), w.want) {
		w.t.Fatal("the disk differs from the model")
	}
}

// TestDiskAgainstModel runs random operations, captures, merges and crashes.
func TestDiskAgainstModel(t *testing.T) {
	seeds, steps := 12, 300
	if testing.Short() {
		seeds = 3
	}
	for _, mode := range []Durability{SyncHost, SyncProcess} {
		for seed := range seeds {
			w := newWorld(t, uint64(seed), mode)
			for range steps {
				w.step()
			}
			w.verifyAll()
			if s := w.disk.Overlay().Stats(); s.FileBytes > w.disk.Overlay().header.slotOffset(testBlocks) {
				t.Fatalf("overlay has %d bytes", s.FileBytes)
			}
		}
	}
}

// TestSlotsAreReused: rewriting a disk over and over does not grow its file.
func TestSlotsAreReused(t *testing.T) {
	f := &volatileFile{}
	o, err := Create(f, Header{Blocks: 100}, SyncProcess)
	if err != nil {
		t.Fatal(err)
	}
	d, err := NewDisk(Chain{Top: o})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		if err := d.WriteAt(fill(uint64(i+1), 800), 0); err != nil {
			t.Fatal(err)
		}
		if err := d.Zero(0, 100*BlockSize); err != nil {
			t.Fatal(err)
		}
	}
	if got, limit := f.size(), o.header.slotOffset(100); got > limit {
		t.Fatalf("%d bytes, more than %d", got, limit)
	}
	if s := o.Stats(); s.DataBlocks != 0 || s.ZeroBlocks != 100 {
		t.Fatalf("%+v", s)
	}
}

// TestWriteErrorLeavesTheRest: a full disk fails one request and damages nothing else.
func TestWriteErrorLeavesTheRest(t *testing.T) {
	w := newWorld(t, 99, SyncHost)
	full := errors.New("no space left")
	w.top.fail = func() error { return full }
	if err := w.disk.WriteAt(fill(5, 80), 800*sector); !errors.Is(err, full) {
		t.Fatalf("got %v", err)
	}
	w.top.fail = nil
	w.check(w.disk.WriteAt(fill(6, 80), 1600*sector))
	w.check(w.disk.Flush())
	o, err := Recover(w.top.killed(), w.top.size(), SyncHost)
	w.check(err)
	w.assemble(o)
	b := make([]byte, 80*sector)
	w.check(w.disk.ReadAt(b, 1600*sector))
	if !bytes.Equal(b, fill(6, 80)) {
		t.Fatal("what was written after the error is not there")
	}
	w.check(w.disk.ReadAt(b, 900*sector))
	if !slices.Equal(values(t, b), w.want[900:980]) {
		t.Fatal("what was not touched has changed")
	}
}

func TestRangesOutside(t *testing.T) {
	w := newWorld(t, 1, SyncProcess)
	end := w.disk.Bytes()
	b := make([]byte, sector)
	for _, off := range []int64{-1, end, end - 1, 1<<63 - 1, -1 << 63} {
		if w.disk.ReadAt(b, off) == nil || w.disk.WriteAt(b, off) == nil || w.disk.Zero(off, sector) == nil || w.disk.Discard(off, sector) == nil {
			t.Errorf("offset %d was accepted", off)
		}
	}
	if w.disk.Zero(sector, 1<<63-1) == nil || w.disk.Zero(0, -1) == nil {
		t.Error("a length was accepted")
	}
}
