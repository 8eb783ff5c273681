package block

import (
	"fmt"
	"testing"

	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

// loop is a ring of requests that are offered again and again.
type loop struct {
	r     *rig
	q     *vt.Queue
	heads []uint16
	datas []uint64 // header addresses
}

func newLoop(t testing.TB, kind uint32, size, segments, depth int) *loop {
	r := newRig(t, rigConfig{blocks: 64 << 10, memory: 32 << 20})
	r.d.Release(64 << 10)
	l := &loop{r: r, q: r.d.Queues[0]}
	for range depth {
		h := r.d.Alloc(32, 16)
		le.PutUint32(r.d.Bytes(h, 16), kind)
		req := vt.Request{Out: []vt.Buffer{{Addr: h, Len: 16}}, Indirect: true}
		part := uint64(size / segments)
		for range segments {
			b := vt.Buffer{Addr: r.d.Alloc(part, 4096), Len: part}
			r.d.Alloc(1, 1) // not contiguous
			if kind == typeIn {
				req.In = append(req.In, b)
			} else {
				req.Out = append(req.Out, b)
			}
		}
		req.In = append(req.In, vt.Buffer{Addr: h + 16, Len: 1})
		head, ok := l.q.Add(req)
		if !ok {
			t.Fatal("ring is full")
		}
		l.heads, l.datas = append(l.heads, head), append(l.datas, h)
	}
	l.q.Show()
	return l
}

// turn lets the device do all requests, the n-th time.
func (l *loop) turn(n, size int) {
	sectors := uint64(64<<10) * 8
	for i, h := range l.datas {
		at := (uint64(n*len(l.datas)+i) * uint64(size/SectorSize)) % (sectors - uint64(size/SectorSize))
		le.PutUint64(l.r.d.Bytes(h+8, 8), at)
	}
	l.r.tr.Kick(0)
	for _, h := range l.heads {
		l.q.Offer(h)
	}
	l.q.LastUsed += uint16(len(l.heads))
	l.q.WantInterrupt(l.q.LastUsed)
	l.q.Show()
}

func BenchmarkDisk(b *testing.B) {
	for _, c := range []struct {
		name           string
		kind           uint32
		size, segments int
	}{
		{"write-4k", typeOut, 4 << 10, 1},
		{"read-4k", typeIn, 4 << 10, 1},
		{"write-128k", typeOut, 128 << 10, 1},
		{"write-128k-32seg", typeOut, 128 << 10, 32},
		{"read-128k", typeIn, 128 << 10, 1},
		{"read-128k-32seg", typeIn, 128 << 10, 32},
	} {
		b.Run(c.name, func(b *testing.B) {
			const depth = 16
			w := newLoop(b, c.kind, c.size, c.segments, depth)
			if c.kind == typeIn { // something to read
				data := make([]byte, 1<<20)
				for off := int64(0); off < 256<<20; off += int64(len(data)) {
					if err := w.r.dev.disk.WriteAt(data, off); err != nil {
						b.Fatal(err)
					}
				}
			}
			b.SetBytes(int64(c.size * depth))
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				w.turn(n, c.size)
				n++
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n*depth), "ns/request")
		})
	}
}

// TestNoAllocations: a request in the steady state allocates nothing.
func TestNoAllocations(t *testing.T) {
	for _, kind := range []uint32{typeOut, typeIn, typeFlush} {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			w := newLoop(t, kind, 16<<10, 4, 4)
			n := 0
			for range 100 {
				w.turn(0, 16<<10)
			}
			if a := testing.AllocsPerRun(500, func() { w.turn(n%4, 16<<10); n++ }); a > 0.05 {
				t.Errorf("%v allocations per 4 requests", a)
			}
			if f := w.r.dev.Counters(); f.Failed != 0 || f.Reads+f.Writes+f.Flushes < 2000 {
				t.Errorf("%+v", f)
			}
		})
	}
}
