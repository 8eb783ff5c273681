//go:build !race

// The guest of these tests uses its memory while the device does: the race detector would be right.

package nic

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/virtio"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

const patience = 30 * time.Second

var mac = [6]byte{0x52, 0x54, 0, 1, 2, 3}

type signalLine struct{ c chan struct{} }

func (l signalLine) Raise() {
	select {
	case l.c <- struct{}{}:
	default:
	}
}

type guest struct {
	t     testing.TB
	line  signalLine
	clock *vt.Clock
	dev   *Device
	tr    *virtio.Transport
	d     *vt.Driver
	rx    map[uint16]uint64
	got   [][]byte
}

func newGuest(t testing.TB, frames devices.Rate) *guest {
	g := &guest{t: t, line: signalLine{make(chan struct{}, 1)}, clock: &vt.Clock{}, rx: map[uint16]uint64{}}
	dev, err := New(Config{MAC: mac, Clock: g.clock, Frames: frames})
	if err != nil {
		t.Fatal(err)
	}
	g.dev = dev
	t.Cleanup(dev.Close)
	mem := vt.NewMemory(1<<20, 4096)
	if g.tr, err = virtio.NewTransport(virtio.Config{Name: "net", Memory: mem, Interrupt: g.line}, dev); err != nil {
		t.Fatal(err)
	}
	g.tr.Resume()
	g.d = vt.NewDriver(g.tr, mem)
	if err := g.d.Init(^uint64(0), 32); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *guest) fill(buffers int) {
	for range buffers {
		g.give(g.d.Alloc(1600, 64))
	}
	g.d.Queues[toGuest].Kick()
}

func (g *guest) give(at uint64) {
	h, ok := g.d.Queues[toGuest].Add(vt.Request{In: []vt.Buffer{{Addr: at, Len: 12}, {Addr: at + 12, Len: 1518}}})
	if !ok {
		g.t.Fatal("ring is full")
	}
	g.rx[h] = at
}

func (g *guest) interrupt() {
	g.d.Interrupted()
	q := g.d.Queues[toGuest]
	for u, ok := q.Poll(); ok; u, ok = q.Poll() {
		at := g.rx[u.Head]
		b := g.d.Bytes(at, uint64(u.Len))
		if b[10] != 1 {
			g.t.Fatalf("header % x", b[:12])
		}
		g.got = append(g.got, bytes.Clone(b[12:]))
		delete(g.rx, u.Head)
		g.give(at)
		q.Kick()
	}
}

func (g *guest) send(frame []byte) bool {
	q := g.d.Queues[fromGuest]
	for _, ok := q.Poll(); ok; _, ok = q.Poll() {
	}
	if q.Outstanding() == 0 {
		g.d.Release(512 << 10)
	}
	if q.Free() < 2 {
		return false
	}
	at := g.d.Alloc(12+uint64(len(frame)), 1)
	clear(g.d.Bytes(at, 12))
	copy(g.d.Bytes(at+12, uint64(len(frame))), frame)
	r := vt.Request{Out: []vt.Buffer{{Addr: at, Len: 12}}}
	if len(frame) > 0 {
		r.Out = append(r.Out, vt.Buffer{Addr: at + 12, Len: uint64(len(frame))})
	}
	q.Add(r)
	q.Kick()
	return true
}

func (g *guest) connect() *os.File {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		g.t.Fatal(err)
	}
	host := os.NewFile(uintptr(fds[0]), "host")
	g.t.Cleanup(func() { host.Close() })
	if err := g.dev.Connect(os.NewFile(uintptr(fds[1]), "cable")); err != nil {
		g.t.Fatal(err)
	}
	return host
}

func (g *guest) await(what string, done func() bool) {
	g.t.Helper()
	late := time.After(patience)
	for g.interrupt(); !done(); g.interrupt() {
		select {
		case <-g.line.c:
		case <-late:
			g.t.Fatalf("%s: not in %v (%v)", what, patience, g.tr.Failure())
		}
	}
}

func frame(n int, fill byte) []byte { return bytes.Repeat([]byte{fill}, n) }

func TestConfigSpace(t *testing.T) {
	g := newGuest(t, devices.Rate{})
	c := g.d.Config(0, 12)
	if !bytes.Equal(c[:6], mac[:]) || c[6] != 1 || c[10] != 0xdc || c[11] != 5 {
		t.Errorf("% x", c)
	}
}

// TestFramesBothWays sends frames of random lengths both ways, with pauses and loads in between. All
// arrive, in order, as they were.
func TestFramesBothWays(t *testing.T) {
	g := newGuest(t, devices.Rate{})
	g.d.Release(256 << 10)
	g.fill(8)
	h := g.connect()
	r := rand.New(rand.NewPCG(1, 8))
	var toHost, toGuest [][]byte
	buf := make([]byte, 4096)
	arrived := 0
	take := func() {
		for arrived < len(toHost) {
			h.SetReadDeadline(time.Now().Add(patience))
			n, err := h.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(buf[:n], toHost[arrived]) {
				t.Fatalf("frame %d differs", arrived)
			}
			arrived++
		}
	}
	for i := range 3000 {
		f := frame(14+r.IntN(1500), byte(i))
		switch op := r.IntN(20); {
		case op < 8:
			if g.send(f) {
				toHost = append(toHost, f)
			}
		case op < 16 && len(toGuest)-len(g.got) < 50:
			if _, err := h.Write(f); err != nil {
				t.Fatal(err)
			}
			toGuest = append(toGuest, f)
		case op < 18:
			take()
		case op < 19:
			g.interrupt()
		default:
			g.tr.Pause()
			if err := g.tr.LoadState(g.tr.AppendState(nil)); err != nil {
				t.Fatal(err)
			}
			g.tr.Resume()
		}
	}
	take()
	g.await("frames", func() bool { return len(g.got) == len(toGuest) })
	for i, f := range toGuest {
		if !bytes.Equal(f, g.got[i]) {
			t.Fatalf("frame %d to the guest differs", i)
		}
	}
}

func TestBadFramesAreDropped(t *testing.T) {
	g := newGuest(t, devices.Rate{})
	g.send(frame(100, 1)) // nobody is there
	g.fill(4)
	h := g.connect()
	g.send(frame(13, 2))
	g.send(frame(1519, 3))
	g.send(frame(0, 4))
	g.send(frame(1518, 5))
	b := make([]byte, 4096)
	h.SetReadDeadline(time.Now().Add(patience))
	if n, err := h.Read(b); n != 1518 || err != nil || b[0] != 5 {
		t.Fatalf("%d bytes of %d, %v", n, b[0], err)
	}
	for _, n := range []int{5, 3000, 1519, 60} {
		if _, err := h.Write(frame(n, byte(n))); err != nil {
			t.Fatal(err)
		}
	}
	g.await("frame", func() bool { return len(g.got) == 1 })
	if len(g.got[0]) != 60 {
		t.Fatalf("%d bytes", len(g.got[0]))
	}
	if _, _, dropped := g.dev.Counters(); dropped != 7 {
		t.Errorf("%d dropped", dropped)
	}
	q := g.d.Queues[fromGuest]
	q.Add(vt.Request{Out: []vt.Buffer{{Addr: 4096, Len: 11}}})
	q.Kick()
	if !errors.Is(g.tr.Failure(), errdefs.ErrGuest) {
		t.Errorf("half a header: %v", g.tr.Failure())
	}
}

// TestHostGone: a cable that ends is no failure, and another one can be put in.
func TestHostGone(t *testing.T) {
	g := newGuest(t, devices.Rate{})
	g.fill(4)
	h := g.connect()
	h.Close()
	for g.dev.connected() != nil {
		g.send(frame(60, 1))
	}
	h = g.connect()
	g.send(frame(60, 2))
	b := make([]byte, 100)
	h.SetReadDeadline(time.Now().Add(patience))
	if n, err := h.Read(b); n != 60 || err != nil || b[0] != 2 {
		t.Fatalf("%d bytes of %d, %v", n, b[0], err)
	}
	if g.tr.Failure() != nil {
		t.Error(g.tr.Failure())
	}
}

func TestRateLimit(t *testing.T) {
	g := newGuest(t, devices.Rate{PerSecond: 10, Burst: 3})
	g.connect()
	for range 8 {
		g.send(frame(60, 1))
	}
	if _, sent, _ := g.dev.Counters(); sent != 3 {
		t.Fatalf("%d frames at once", sent)
	}
	for range 5 {
		g.clock.Advance(101 * time.Millisecond)
	}
	if _, sent, _ := g.dev.Counters(); sent != 8 {
		t.Fatalf("%d frames after half a second", sent)
	}
}

// FuzzNet: a hostile guest while frames come in. A reset makes the card work again.
func FuzzNet(f *testing.F) {
	f.Add([]byte{4, 0, 0, 1, 0, 0, 0, 0x40, 6, 0, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, 5, 1, 0, 2, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, program []byte) {
		g := newGuest(t, devices.Rate{})
		h := g.connect()
		g.d.RunHostile(program[:min(len(program), 100*vt.OpSize)], func(n byte) {
			switch n % 3 {
			case 0:
				h.SetWriteDeadline(time.Now())
				h.Write(frame(int(n)*7+1, n))
			case 1:
				h = g.connect()
			default:
				g.tr.Pause()
				if err := g.tr.LoadState(g.tr.AppendState(nil)); err != nil {
					t.Fatal(err)
				}
				g.tr.Resume()
			}
		})
		if err := g.d.Init(^uint64(0), 16); err != nil {
			t.Fatal(err)
		}
		h = g.connect()
		g.send(frame(60, 9))
		h.SetReadDeadline(time.Now().Add(patience))
		if n, err := h.Read(make([]byte, 100)); n != 60 || err != nil {
			t.Fatalf("%d bytes, %v (%v)", n, err, g.tr.Failure())
		}
	})
}

func TestGoldenState(t *testing.T) {
	g := newGuest(t, devices.Rate{})
	state := vt.Golden(t, "nic_v1", g.dev.AppendState(nil))
	other, err := New(Config{MAC: [6]byte{2, 9, 9, 9, 9, 9}, Clock: g.clock})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.LoadState(state); err != nil || other.cfg.MAC != mac {
		t.Errorf("%v, address % x", err, other.cfg.MAC)
	}
}
