//go:build !race

package console

import (
	"bytes"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/vmm/virtio"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

// FuzzConsole: a hostile guest at the console while the host connects, writes and hangs up. Afterwards a
// reset makes the port work again.
func FuzzConsole(f *testing.F) {
	f.Add([]byte{5, 3, 0, 0, 0, 0, 0, 0, 5, 3, 4, 0, 3, 0, 1, 0, 11, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{11, 0, 0, 0, 0, 0, 0, 0, 5, 5, 0, 2, 1, 2, 3, 4, 11, 3, 0, 0, 0, 0, 0, 0, 5, 3, 4, 0, 6, 0, 1, 0})
	f.Add([]byte{6, 2, 0, 0, 1, 0, 0, 0, 4, 4, 0, 1, 9, 9, 9, 9, 6, 4, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, program []byte) {
		g := &guest{t: t, mem: vt.NewMemory(512<<10, 4096), rx: map[uint16]uint64{}, control: map[uint16]uint64{}}
		g.attach()
		g.d = vt.NewDriver(g.tr, g.mem)
		g.tr.Resume()
		if err := g.d.Init(allFeatures, 16); err != nil {
			t.Fatal(err)
		}
		var h *os.File
		g.d.RunHostile(program[:min(len(program), 100*vt.OpSize)], func(n byte) {
			switch n % 5 {
			case 0:
				h = g.connect()
			case 1:
				if h != nil {
					h.Close()
				}
			case 2:
				g.tr.Pause()
				if err := g.tr.LoadState(g.tr.AppendState(nil)); err != nil {
					t.Fatal(err)
				}
				g.tr.Resume()
			default:
				if h != nil {
					h.SetWriteDeadline(time.Now())
					h.Write(bytes.Repeat([]byte{n}, 100))
				}
			}
		})
		g.dev.Close()
		// The driver is loaded again, with the same device and nobody connected.
		if err := g.d.Init(allFeatures, 16); err != nil {
			t.Fatalf("a reset does not help: %v", err)
		}
		g.say(1, eventPortReady, 1)
		if g.tr.Failure() != nil {
			t.Fatal(g.tr.Failure())
		}
	})
}

// loop is a guest that writes the same requests again and again.
type loop struct {
	g     *guest
	q     *vt.Queue
	heads []uint16
}

func newLoop(t testing.TB, size, depth int) (*loop, *os.File) {
	g := newGuest(t, 64)
	g.await("name", func() bool { return g.named })
	h := g.connect()
	g.await("connection", func() bool { return g.connected })
	g.d.Release(1 << 20)
	l := &loop{g: g, q: g.d.Queues[queueFromGuest(0)]}
	for range depth {
		head, ok := l.q.Add(vt.Request{Out: []vt.Buffer{{Addr: g.d.Alloc(uint64(size), 64), Len: uint64(size)}}})
		if !ok {
			t.Fatal("ring is full")
		}
		l.heads = append(l.heads, head)
	}
	l.q.Show()
	return l, h
}

// turn lets the device take all requests; if the host is slow, it waits for it.
func (l *loop) turn() {
	l.g.tr.Kick(queueFromGuest(0))
	for range l.heads {
		for _, ok := l.q.Poll(); !ok; _, ok = l.q.Poll() {
			<-l.g.line.c
		}
	}
	for _, h := range l.heads {
		l.q.Offer(h)
	}
	l.q.Show()
}

func BenchmarkFromGuest(b *testing.B) {
	for name, size := range map[string]int{"64": 64, "4k": 4 << 10, "32k": 32 << 10} {
		b.Run(name, func(b *testing.B) {
			const depth = 16
			l, h := newLoop(b, size, depth)
			done := make(chan struct{})
			go func() {
				defer close(done)
				io.Copy(io.Discard, struct{ io.Reader }{h})
			}()
			b.SetBytes(int64(size * depth))
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				l.turn()
				n++
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n*depth), "ns/request")
			l.g.dev.Close()
			<-done
		})
	}
}

// TestNoAllocations: moving bytes from and to the guest allocates nothing in the device.
func TestNoAllocations(t *testing.T) {
	l, h := newLoop(t, 512, 1)
	fd := int(h.Fd()) // blocking from now on, for this end only
	buf := make([]byte, 512)
	q := l.q
	if a := testing.AllocsPerRun(1000, func() {
		q.Show()
		l.g.tr.Kick(q.Index)
		if n, err := unix.Read(fd, buf); n != len(buf) || err != nil {
			t.Fatal(n, err)
		}
		q.Offer(l.heads[0])
	}); a > 0.05 {
		t.Errorf("%v allocations per request from the guest", a)
	}
	in := l.g.d.Queues[queueToGuest(0)]
	head := uint16(0)
	for k := range l.g.rx {
		head = k
	}
	if a := testing.AllocsPerRun(1000, func() {
		if n, err := unix.Write(fd, buf); n != len(buf) || err != nil {
			t.Fatal(n, err)
		}
		for le.Uint16(l.g.d.Bytes(in.UsedAt+2, 2)) == in.LastUsed {
			<-l.g.line.c
		}
		in.LastUsed++
		in.WantInterrupt(in.LastUsed)
		in.Offer(head)
		in.Show()
		l.g.tr.Kick(in.Index)
	}); a > 0.05 {
		t.Errorf("%v allocations per request to the guest", a)
	}
}

// TestWriteErrorEndsConnection: the host is gone while the guest writes and has given no buffers.
func TestWriteErrorEndsConnection(t *testing.T) {
	g := newGuest(t, 16)
	g.await("name", func() bool { return g.named })
	h := g.connect()
	g.await("connection", func() bool { return g.connected })
	g.say(1, eventPortOpen, 0) // so that nothing is read, and an end is not seen
	h.Close()
	g.write([]byte("kept"), 1)
	g.await("hang-up", func() bool { return !g.connected })
	h = g.connect()
	b := make([]byte, 4)
	h.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadFull(h, b); err != nil || string(b) != "kept" {
		t.Fatalf("%q %v", b, err)
	}
}

var _ virtio.Device = (*Device)(nil)
