package block

import (
	"bytes"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/layerfmt/cow1"
	"forkd.dev/forkd/internal/vmm/devices"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

func TestConfigSpace(t *testing.T) {
	r := newRig(t, rigConfig{blocks: 1000})
	c := r.d.Config(0, 60)
	if got := le.Uint64(c); got != 8000 {
		t.Errorf("capacity %d sectors", got)
	}
	if le.Uint32(c[20:]) != 512 || c[24] != 3 || c[56] != 1 {
		t.Errorf("config % x", c)
	}
}

func TestIdentity(t *testing.T) {
	r := newRig(t, rigConfig{blocks: 10})
	if s, b := r.request(nil, typeGetID, 0, nil, 20); s != statusOK || !strings.HasPrefix(string(b), "forkd-disk\x00") {
		t.Errorf("status %d, %q", s, b)
	}
	if s, _ := r.request(nil, 77, 0, nil, 8); s != statusUnsupported {
		t.Errorf("status %d of an unknown request", s)
	}
}

// model is what the guest sees of a disk.
type model []byte

type randomDisk struct {
	r *rig
	m model
}

const diskSectors = 1500 * 8

func (x *randomDisk) step(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 3))
	n := 1 + r.IntN(64)
	if r.IntN(4) == 0 {
		n = 8 * (1 + r.IntN(30))
	}
	sector := r.IntN(diskSectors - n + 1)
	if r.IntN(2) == 0 {
		sector = sector / 8 * 8
	}
	part := x.m[sector*SectorSize : (sector+n)*SectorSize]
	switch op := r.IntN(20); {
	case op < 8:
		data := make([]byte, len(part))
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		if s, _ := x.r.request(r, typeOut, uint64(sector), data, 0); s != statusOK {
			t.Fatalf("write: status %d", s)
		}
		copy(part, data)
	case op < 15:
		s, got := x.r.request(r, typeIn, uint64(sector), nil, len(part))
		if s != statusOK || !bytes.Equal(got, part) {
			t.Fatalf("read of %d+%d: status %d or wrong content", sector, n, s)
		}
	case op < 16:
		if s, _ := x.r.request(r, typeFlush, 0, nil, 0); s != statusOK {
			t.Fatalf("flush: status %d", s)
		}
	case op < 18:
		if s, _ := x.r.request(r, typeWriteZeroes, 0, segment(uint64(sector), uint32(n), uint32(r.IntN(2))), 0); s != statusOK {
			t.Fatalf("write zeroes: status %d", s)
		}
		clear(part)
	default:
		if s, _ := x.r.request(r, typeDiscard, 0, segment(uint64(sector), uint32(n), 0), 0); s != statusOK {
			t.Fatalf("discard: status %d", s)
		}
		first, end := (sector+7)/8*8, (sector+n)/8*8
		if first < end {
			clear(x.m[first*SectorSize : end*SectorSize])
		}
	}
}

// TestRandomRequests compares the disk with a flat one; now and then the machine is captured, and
// source and fork go on each for itself.
func TestRandomRequests(t *testing.T) {
	seeds, steps := 10, 500
	if testing.Short() {
		seeds = 3
	}
	for seed := range seeds {
		rnd := rand.New(rand.NewPCG(uint64(seed), 4))
		m := make(model, diskSectors*SectorSize)
		base := m[:900*cow1.BlockSize+777]
		for i := range base {
			base[i] = byte(rnd.Uint32())
		}
		all := []*randomDisk{{r: newRig(t, rigConfig{blocks: diskSectors / 8, base: base}), m: m}}
		for i := range steps {
			x := all[rnd.IntN(len(all))]
			if i%50 == 49 && len(all) < 4 {
				all = append(all, &randomDisk{r: x.r.fork(), m: bytes.Clone(x.m)})
			}
			x.step(t, rnd.Uint64())
		}
		for _, x := range all {
			for s := 0; s < diskSectors; s += 200 {
				if st, got := x.r.request(nil, typeIn, uint64(s), nil, 200*SectorSize); st != statusOK || !bytes.Equal(got, x.m[s*SectorSize:][:len(got)]) {
					t.Fatalf("sectors %d+200: status %d or wrong content", s, st)
				}
			}
			if len(x.r.errs) > 0 {
				t.Fatal(x.r.errs)
			}
		}
	}
}

// TestForkInMidQueue: requests that the device has not begun when the machine is captured are done by
// source and fork alike.
func TestForkInMidQueue(t *testing.T) {
	r := newRig(t, rigConfig{blocks: 100, bytes: devices.Rate{PerSecond: 1000, Burst: 1}})
	q := r.d.Queues[0]
	at := r.d.Alloc(16+8*SectorSize+1, 1)
	b := r.d.Bytes(at, 16+8*SectorSize)
	for i := range uint64(6) {
		le.PutUint32(b, typeOut)
		le.PutUint64(b[8:], 8*i)
		copy(b[16:], bytes.Repeat([]byte{'x'}, 8*SectorSize))
		h := r.d.Alloc(16, 1)
		copy(r.d.Bytes(h, 16), b[:16])
		q.Add(vt.Request{Out: []vt.Buffer{{Addr: h, Len: 16}, {Addr: at + 16, Len: 8 * SectorSize}}, In: []vt.Buffer{{Addr: at + 16 + 8*SectorSize, Len: 1}}})
	}
	q.Kick()
	f := r.fork()
	for name, x := range map[string]*rig{"source": r, "fork": f} {
		for range 100 {
			x.clock.Advance(time.Second)
		}
		n := 0
		for _, ok := x.d.Queues[0].Poll(); ok; _, ok = x.d.Queues[0].Poll() {
			n++
		}
		if n != 6 {
			t.Errorf("%s has done %d requests", name, n)
		}
		x.dev.bytes = devices.Bucket{}
		for i := range uint64(6) {
			if _, got := x.request(nil, typeIn, 8*i, nil, 8*SectorSize); !bytes.Equal(got, bytes.Repeat([]byte{'x'}, 8*SectorSize)) {
				t.Errorf("%s: block %d was not written", name, i)
			}
		}
	}
}

func TestRateLimit(t *testing.T) {
	r := newRig(t, rigConfig{blocks: 100, requests: devices.Rate{PerSecond: 10, Burst: 2}})
	q := r.d.Queues[0]
	at := r.d.Alloc(64, 1)
	le.PutUint32(r.d.Bytes(at, 16), typeFlush)
	for range 12 {
		q.Add(vt.Request{Out: []vt.Buffer{{Addr: at, Len: 16}}, In: []vt.Buffer{{Addr: at + 16, Len: 1}}})
	}
	q.Kick()
	done := func() (n int) {
		for _, ok := q.Poll(); ok; _, ok = q.Poll() {
			n++
		}
		return n
	}
	if n := done(); n != 2 {
		t.Fatalf("%d requests at once, burst is 2", n)
	}
	if n := r.clock.Pending(); n != 1 {
		t.Fatalf("%d timers", n)
	}
	total := 0
	for range 11 {
		r.clock.Advance(101 * time.Millisecond)
		n := done()
		if total += n; n > 1 {
			t.Fatalf("%d requests in 101 ms", n)
		}
	}
	if total != 10 {
		t.Fatalf("%d more requests in 1.1 s", total)
	}
	r.d.SetReg(vt.RegStatus, 0)
	if n := r.clock.Pending(); n != 0 {
		t.Fatalf("%d timers after a reset", n)
	}
}

func TestBadRequests(t *testing.T) {
	r := newRig(t, rigConfig{blocks: 100})
	for name, c := range map[string]struct {
		kind   uint32
		sector uint64
		out    []byte
		in     int
		status byte
	}{
		"read behind the end":     {typeIn, 800, nil, 512, statusIOError},
		"read over the end":       {typeIn, 799, nil, 1024, statusIOError},
		"sector near 2^64":        {typeIn, ^uint64(0), nil, 512, statusIOError},
		"sector that wraps":       {typeIn, 1 << 55, nil, 512, statusIOError},
		"odd length":              {typeIn, 0, nil, 100, statusIOError},
		"write behind the end":    {typeOut, 800, make([]byte, 512), 0, statusIOError},
		"write of odd length":     {typeOut, 0, make([]byte, 513), 0, statusIOError},
		"discard of nothing":      {typeDiscard, 0, nil, 0, statusIOError},
		"discard of two":          {typeDiscard, 0, append(segment(0, 8, 0), segment(8, 8, 0)...), 0, statusIOError},
		"discard with unmap":      {typeDiscard, 0, segment(0, 8, 1), 0, statusUnsupported},
		"zeroes behind the end":   {typeWriteZeroes, 0, segment(799, 2, 0), 0, statusIOError},
		"zeroes with odd flags":   {typeWriteZeroes, 0, segment(0, 8, 2), 0, statusUnsupported},
		"discard of far too much": {typeDiscard, 0, segment(0, ^uint32(0), 0), 0, statusIOError},
		"empty read":              {typeIn, 0, nil, 0, statusOK},
		"short id":                {typeGetID, 0, nil, 3, statusOK},
	} {
		if s, _ := r.request(nil, c.kind, c.sector, c.out, c.in); s != c.status {
			t.Errorf("%s: status %d, want %d", name, s, c.status)
		}
	}
	if r.tr.Failure() != nil {
		t.Fatal(r.tr.Failure())
	}
	q := r.d.Queues[0]
	at := r.d.Alloc(64, 1)
	q.Add(vt.Request{Out: []vt.Buffer{{Addr: at, Len: 15}}, In: []vt.Buffer{{Addr: at + 16, Len: 1}}})
	q.Kick()
	if r.tr.Failure() == nil || r.d.Reg(vt.RegStatus)&vt.StatusNeedsReset == 0 {
		t.Error("a request without a whole header is no failure")
	}
}

// TestHostErrors: a layer that is damaged fails requests, and says so at most once a second.
func TestHostErrors(t *testing.T) {
	r := newRig(t, rigConfig{blocks: 5000})
	if s, _ := r.request(nil, typeOut, 0, make([]byte, 8*SectorSize), 0); s != statusOK {
		t.Fatal("write")
	}
	f := r.fork()
	layer := f.layers[0]
	if _, err := layer.WriteAt([]byte{1, 2, 3}, 4096+5); err != nil { // one place of map page 0
		t.Fatal(err)
	}
	if _, err := layer.WriteAt([]byte{1, 2, 3}, 8192+5); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if s, _ := f.request(nil, typeIn, 0, nil, 512); s != statusIOError {
			t.Fatalf("status %d", s)
		}
	}
	if len(f.errs) != 1 {
		t.Fatalf("%d reports: %v", len(f.errs), f.errs)
	}
	if s, _ := f.request(nil, typeIn, 1020*8, nil, 512); s != statusOK {
		t.Fatalf("what is not damaged: status %d", s)
	}
}

// TestDiscardGivesSpaceBack: the file of the overlay takes less of the host's disk afterwards.
func TestDiscardGivesSpaceBack(t *testing.T) {
	r := newRig(t, rigConfig{blocks: 2000, memory: 4 << 20})
	data := bytes.Repeat([]byte{1}, 1<<20)
	if s, _ := r.request(nil, typeOut, 0, data, 0); s != statusOK {
		t.Fatal("write")
	}
	before := blocksOf(t, r.top)
	if s, _ := r.request(nil, typeDiscard, 0, segment(0, 2048, 0), 0); s != statusOK {
		t.Fatal("discard")
	}
	if after := blocksOf(t, r.top); after > before-1800 {
		t.Errorf("%d sectors before, %d after", before, after)
	}
}

func blocksOf(t *testing.T, f *os.File) int64 {
	t.Helper()
	n, err := allocated(f)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestGoldenState(t *testing.T) {
	r := newRig(t, rigConfig{blocks: 1000})
	if err := r.dev.LoadState(vt.Golden(t, "block_v1", r.dev.AppendState(nil))); err != nil {
		t.Fatal(err)
	}
	if err := newRig(t, rigConfig{blocks: 1001}).dev.LoadState(r.dev.AppendState(nil)); err == nil {
		t.Error("the state of a disk of another length is accepted")
	}
}
