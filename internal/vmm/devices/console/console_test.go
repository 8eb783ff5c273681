//go:build !race

// The guest of these tests uses its memory while the device does, as guests do: the race detector
// would be right about every byte.

package console

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/virtio"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

var le = binary.LittleEndian

const (
	allFeatures = ^uint64(0)
	agent       = "org.forkd.agent"
	patience    = 30 * time.Second
)

// signalLine tells a goroutine that waits of interrupts.
type signalLine struct{ c chan struct{} }

func (l signalLine) Raise() {
	select {
	case l.c <- struct{}{}:
	default:
	}
}

// guest is a machine whose driver does what Linux's virtio_console does.
type guest struct {
	t    testing.TB
	mem  *vt.Memory
	line signalLine
	dev  *Device
	tr   *virtio.Transport
	d    *vt.Driver

	port         *os.File // the device's end of the last connection
	added, named bool
	connected    bool // as the device told
	input        []byte
	rx           map[uint16]uint64 // address of the buffer by head, of port 1 and control
	control      map[uint16]uint64
}

const bufferLen = 4096

func newGuest(t testing.TB, size uint16) *guest {
	g := &guest{t: t, mem: vt.NewMemory(2<<20, 4096), rx: map[uint16]uint64{}, control: map[uint16]uint64{}}
	g.attach()
	g.d = vt.NewDriver(g.tr, g.mem)
	g.tr.Resume()
	if err := g.d.Init(allFeatures, size); err != nil {
		t.Fatal(err)
	}
	if n := le.Uint32(g.d.Config(4, 4)); n != 2 || len(g.d.Queues) != 6 {
		t.Fatalf("%d ports, %d queues", n, len(g.d.Queues))
	}
	for range min(8, size) {
		g.give(controlToGuest, g.control, g.d.Alloc(bufferLen, 64))
	}
	g.d.Queues[controlToGuest].Kick()
	g.say(0, eventDeviceReady, 1)
	return g
}

func (g *guest) attach() {
	dev, err := New(agent)
	if err != nil {
		g.t.Fatal(err)
	}
	g.dev, g.line = dev, signalLine{make(chan struct{}, 1)}
	if g.tr, err = virtio.NewTransport(virtio.Config{Name: "console", Memory: g.mem, Interrupt: g.line}, dev); err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(dev.Close)
}

func (g *guest) give(queue int, table map[uint16]uint64, at uint64) {
	h, ok := g.d.Queues[queue].Add(vt.Request{In: []vt.Buffer{{Addr: at, Len: bufferLen}}})
	if !ok {
		g.t.Fatal("ring is full")
	}
	table[h] = at
}

// say sends a control message.
func (g *guest) say(id uint32, event, value uint16) {
	q := g.d.Queues[controlFromGuest]
	mark := g.d.Mark()
	at := g.d.Alloc(8, 8)
	b := g.d.Bytes(at, 8)
	le.PutUint32(b, id)
	le.PutUint16(b[4:], event)
	le.PutUint16(b[6:], value)
	if _, ok := q.Add(vt.Request{Out: []vt.Buffer{{Addr: at, Len: 8}}}); !ok {
		g.t.Fatal("control ring is full")
	}
	q.Kick()
	if _, ok := q.Poll(); !ok {
		g.t.Fatalf("control message is not taken: %v", g.tr.Failure())
	}
	g.d.Release(mark)
	g.interrupt()
}

// interrupt is the interrupt handler: it takes control messages and input.
func (g *guest) interrupt() {
	g.d.Interrupted()
	q := g.d.Queues[controlToGuest]
	for u, ok := q.Poll(); ok; u, ok = q.Poll() {
		at := g.control[u.Head]
		m := bytes.Clone(g.d.Bytes(at, uint64(u.Len)))
		delete(g.control, u.Head)
		g.give(controlToGuest, g.control, at)
		q.Kick()
		g.hear(le.Uint32(m), le.Uint16(m[4:]), le.Uint16(m[6:]), m[8:])
	}
	q = g.d.Queues[queueToGuest(0)]
	for u, ok := q.Poll(); ok; u, ok = q.Poll() {
		at := g.rx[u.Head]
		delete(g.rx, u.Head)
		g.input = append(g.input, g.d.Bytes(at, uint64(u.Len))...)
		g.give(queueToGuest(0), g.rx, at)
		q.Kick()
	}
}

func (g *guest) hear(id uint32, event, value uint16, rest []byte) {
	if id != 1 {
		g.t.Fatalf("message %d for port %d", event, id)
	}
	switch event {
	case eventPortAdd:
		g.added = true
		for range min(6, g.d.Queues[queueToGuest(0)].Size) {
			g.give(queueToGuest(0), g.rx, g.d.Alloc(bufferLen, 64))
		}
		g.d.Queues[queueToGuest(0)].Kick()
		g.say(1, eventPortReady, 1)
	case eventPortName:
		g.named = string(rest) == agent
		g.say(1, eventPortOpen, 1) // a program opens it
	case eventPortOpen:
		g.connected = value == 1
	default:
		g.t.Fatalf("unexpected message %d", event)
	}
}

// await runs interrupt handlers until done.
func (g *guest) await(what string, done func() bool) {
	g.t.Helper()
	late := time.After(patience)
	for g.interrupt(); !done(); g.interrupt() {
		select {
		case <-g.line.c:
		case <-late:
			g.t.Fatalf("%s: not in %v (failure %v)", what, patience, g.tr.Failure())
		}
	}
}

// write puts bytes into the port in pieces; it returns false if the ring has no room.
func (g *guest) write(p []byte, pieces int) bool {
	q := g.d.Queues[queueFromGuest(0)]
	for _, ok := q.Poll(); ok; _, ok = q.Poll() {
	}
	if q.Free() < pieces {
		return false
	}
	if q.Outstanding() == 0 {
		g.d.Release(1 << 20)
	}
	at := g.d.Alloc(uint64(len(p)), 1)
	copy(g.d.Bytes(at, uint64(len(p))), p)
	var r vt.Request
	for i := pieces; i > 0; i-- {
		n := uint64(len(p) / i)
		p = p[n:]
		if n > 0 {
			r.Out = append(r.Out, vt.Buffer{Addr: at, Len: n})
		}
		at += n
	}
	if len(r.Out) == 0 {
		return true
	}
	q.Add(r)
	q.Kick()
	return true
}

// host is the other end of a connection.
func (g *guest) connect() *os.File {
	g.t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		g.t.Fatal(err)
	}
	host := os.NewFile(uintptr(fds[0]), "host")
	g.t.Cleanup(func() { host.Close() })
	g.port = os.NewFile(uintptr(fds[1]), "port")
	if err := g.dev.Connect(0, g.port); err != nil {
		g.t.Fatal(err)
	}
	return host
}

func TestBootSequence(t *testing.T) {
	g := newGuest(t, 64)
	g.await("name", func() bool { return g.named })
	if g.connected {
		t.Error("connected to nobody")
	}
	h := g.connect()
	g.await("connection", func() bool { return g.connected })
	h.Close()
	g.await("hang-up", func() bool { return !g.connected })
	if g.dev.Connected(0) {
		t.Error("a closed connection is kept")
	}
	first := g.connect()
	g.await("connection", func() bool { return g.connected })
	g.connect() // replaces the first, and the guest is not told
	if _, err := first.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("replaced connection: %v", err)
	}
	g.interrupt()
	if !g.connected {
		t.Error("guest was told of a replacement")
	}
}

// TestNothingBeforeOpen: Linux throws away what arrives at a port that no program has open.
func TestNothingBeforeOpen(t *testing.T) {
	g := newGuest(t, 64)
	g.await("name", func() bool { return g.named })
	g.say(1, eventPortOpen, 0)
	h := g.connect()
	if _, err := h.Write([]byte("early")); err != nil {
		t.Fatal(err)
	}
	g.await("connection", func() bool { return g.connected })
	g.say(1, eventPortOpen, 0)
	if len(g.input) > 0 {
		t.Fatalf("closed port got %q", g.input)
	}
	g.say(1, eventPortOpen, 1)
	g.await("bytes", func() bool { return string(g.input) == "early" })
}

// stream is one direction of a port.
type stream struct{ sent, got []byte }

// TestRandomStreams sends random bytes both ways while the machine is paused, saved, loaded, forked and
// connected anew. Each byte arrives once and in order.
func TestRandomStreams(t *testing.T) {
	seeds, steps := 12, 400
	if testing.Short() {
		seeds = 3
	}
	for seed := range seeds {
		x := &traffic{t: t, r: rand.New(rand.NewPCG(uint64(seed), 6)), g: newGuest(t, []uint16{8, 64}[seed%2])}
		x.g.await("name", func() bool { return x.g.named })
		x.h = x.g.connect()
		x.g.await("connection", func() bool { return x.g.connected })
		for range steps {
			x.step()
		}
		x.drain()
		if len(x.out.sent) == 0 || len(x.in.sent) == 0 {
			t.Fatal("nothing was sent")
		}
	}
}

type traffic struct {
	t       *testing.T
	r       *rand.Rand
	g       *guest
	h       *os.File
	out, in stream // from and to the guest
}

func (x *traffic) bytes(limit int) []byte {
	p := make([]byte, 1+x.r.IntN(limit))
	for i := range p {
		p[i] = byte(x.r.Uint32())
	}
	return p
}

func (x *traffic) step() {
	switch op := x.r.IntN(100); {
	case op < 35:
		if p := x.bytes(12 << 10); x.g.write(p, 1+x.r.IntN(4)) {
			x.out.sent = append(x.out.sent, p...)
		}
	case op < 60:
		x.hostWrite(x.bytes(20 << 10))
	case op < 80:
		x.hostRead(x.h, 1+x.r.IntN(64<<10))
	case op < 90:
		x.g.interrupt()
	case op < 94:
		x.g.tr.Pause()
		x.step()
		x.g.tr.Resume()
	case op < 97:
		x.g.tr.Pause()
		if err := x.g.tr.LoadState(x.g.tr.AppendState(nil)); err != nil {
			x.t.Fatal(err)
		}
		x.g.tr.Resume()
	case op < 98:
		x.drain()
		x.reconnect()
	default:
		x.fork()
	}
}

func (x *traffic) hostWrite(p []byte) {
	// As much as the socket takes; the rest was never sent.
	raw, err := x.h.SyscallConn()
	if err != nil {
		x.t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		if n, err := unix.Write(int(fd), p); err == nil {
			x.in.sent = append(x.in.sent, p[:n]...)
		}
	})
}

// hostRead takes what is there.
func (x *traffic) hostRead(h *os.File, limit int) {
	raw, err := h.SyscallConn()
	if err != nil {
		x.t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		p := make([]byte, limit)
		if n, err := unix.Read(int(fd), p); err == nil {
			x.out.got = append(x.out.got, p[:n]...)
		}
	})
}

// drain waits until everything has arrived.
func (x *traffic) drain() {
	x.t.Helper()
	x.g.tr.Resume()
	x.h.SetReadDeadline(time.Now().Add(patience))
	rest := make([]byte, len(x.out.sent)-len(x.out.got))
	n, err := io.ReadFull(x.h, rest)
	x.out.got = append(x.out.got, rest[:n]...)
	if err != nil {
		x.t.Fatalf("from the guest: %d bytes sent, %d arrived: %v", len(x.out.sent), len(x.out.got), err)
	}
	x.g.await("bytes to the guest", func() bool {
		x.in.got = append(x.in.got, x.g.input...)
		x.g.input = nil
		return len(x.in.got) >= len(x.in.sent)
	})
	if !bytes.Equal(x.out.sent, x.out.got) || !bytes.Equal(x.in.sent, x.in.got) {
		x.t.Fatal("bytes differ")
	}
}

// reconnect loses what the old connection holds, so both directions were drained; what the guest writes
// while there is no connection comes with the next one.
func (x *traffic) reconnect() {
	x.h.Close()
	x.g.await("hang-up", func() bool { return !x.g.connected })
	if p := x.bytes(9000); x.g.write(p, 2) {
		x.out.sent = append(x.out.sent, p...)
	}
	x.h = x.g.connect()
	x.g.await("connection", func() bool { return x.g.connected })
}

// fork goes on in a restored machine. What the old one's connection has not delivered is in its socket.
func (x *traffic) fork() {
	g := x.g
	g.tr.Pause()
	state := g.tr.AppendState(nil)
	f := &guest{t: x.t, mem: g.mem.Clone(), added: true, named: true, connected: g.connected, input: g.input, rx: map[uint16]uint64{}, control: map[uint16]uint64{}}
	for k, v := range g.rx {
		f.rx[k] = v
	}
	for k, v := range g.control {
		f.control[k] = v
	}
	f.attach()
	if err := f.tr.LoadState(state); err != nil {
		x.t.Fatal(err)
	}
	f.d = g.d.Clone(f.tr, f.mem)
	// To the guest: take back what it has not read. From the guest: read to the end.
	lost := x.unread(g)
	g.dev.Close()
	rest, err := io.ReadAll(x.h)
	if err != nil && !errors.Is(err, unix.ECONNRESET) {
		x.t.Fatal(err)
	}
	x.out.got = append(x.out.got, rest...)
	x.g = f
	x.h = f.connect()
	f.tr.Resume()
	raw, err := x.h.SyscallConn()
	if err != nil {
		x.t.Fatal(err)
	}
	f.await("bytes of the old connection", func() bool {
		raw.Control(func(fd uintptr) {
			if n, err := unix.Write(int(fd), lost); err == nil {
				lost = lost[n:]
			}
		})
		return len(lost) == 0
	})
}

// unread empties the socket of a paused machine.
func (x *traffic) unread(g *guest) []byte {
	var all []byte
	raw, err := g.port.SyscallConn()
	if err != nil {
		x.t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		p := make([]byte, 64<<10)
		for {
			n, err := unix.Read(int(fd), p)
			if n <= 0 || err != nil {
				return
			}
			all = append(all, p[:n]...)
		}
	})
	return all
}

func TestGoldenState(t *testing.T) {
	g := newGuest(t, 16)
	g.await("name", func() bool { return g.named })
	g.connect()
	g.await("connection", func() bool { return g.connected })
	g.tr.Pause()
	g.dev.ports[0].sent = 7 // of a request that the host took in part
	if err := g.dev.LoadState(vt.Golden(t, "console_v1", g.dev.AppendState(nil))); err != nil {
		t.Fatal(err)
	}
	p := g.dev.ports[0]
	if !p.ready || !p.guestOpen || !p.told || p.sent != 7 {
		t.Errorf("%+v", p)
	}
	other, err := New("org.example.other")
	if err != nil {
		t.Fatal(err)
	}
	if err := other.LoadState(g.dev.AppendState(nil)); !errors.Is(err, errdefs.ErrIncompatible) {
		t.Errorf("a port of another name: %v", err)
	}
}
