package block

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/layerfmt/cow1"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/virtio"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

var le = binary.LittleEndian

const allFeatures = ^uint64(0)

// rig is a machine with a disk of files.
type rig struct {
	t      testing.TB
	mem    *vt.Memory
	line   *vt.Line
	clock  *vt.Clock
	dev    *Device
	tr     *virtio.Transport
	d      *vt.Driver
	layers []*os.File
	top    *os.File
	base   *os.File
	blocks uint64
	errs   []error
}

type rigConfig struct {
	blocks          uint64
	base            []byte
	bytes, requests devices.Rate
	memory          int
}

func newRig(t testing.TB, c rigConfig) *rig {
	if c.memory == 0 {
		c.memory = 1 << 20
	}
	r := &rig{t: t, mem: vt.NewMemory(c.memory, 64<<10), clock: &vt.Clock{}, blocks: c.blocks}
	r.base = r.file()
	if _, err := r.base.WriteAt(c.base, 0); err != nil {
		t.Fatal(err)
	}
	r.top = r.file()
	o, err := cow1.Create(File{r.top}, cow1.Header{Blocks: c.blocks}, cow1.SyncProcess)
	if err != nil {
		t.Fatal(err)
	}
	r.attach(o, c)
	r.d = vt.NewDriver(r.tr, r.mem)
	r.tr.Resume()
	if err := r.d.Init(allFeatures, 64); err != nil {
		t.Fatal(err)
	}
	return r
}

// file makes a file in memory that goes with the test.
func (r *rig) file() *os.File {
	fd, err := unix.MemfdCreate("disk", unix.MFD_CLOEXEC)
	if err != nil {
		r.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "disk")
	r.t.Cleanup(func() { f.Close() })
	return f
}

func (r *rig) attach(o *cow1.Overlay, c rigConfig) {
	size := func(f *os.File) int64 {
		st, err := f.Stat()
		if err != nil {
			r.t.Fatal(err)
		}
		return st.Size()
	}
	chain := cow1.Chain{Top: o, Base: r.base, BaseBytes: size(r.base)}
	for _, f := range r.layers {
		l, err := cow1.Open(f, size(f))
		if err != nil {
			r.t.Fatal(err)
		}
		chain.Layers = append(chain.Layers, l)
	}
	disk, err := cow1.NewDisk(chain)
	if err != nil {
		r.t.Fatal(err)
	}
	r.dev, err = New(Config{Disk: disk, ID: "forkd-disk", Clock: r.clock, Bytes: c.bytes, Requests: c.requests,
		OnError: func(err error) { r.errs = append(r.errs, err) }})
	if err != nil {
		r.t.Fatal(err)
	}
	r.line = &vt.Line{}
	if r.tr, err = virtio.NewTransport(virtio.Config{Name: "disk", Memory: r.mem, Interrupt: r.line}, r.dev); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) overlay() (*os.File, *cow1.Overlay) {
	f := r.file()
	o, err := cow1.Create(File{f}, cow1.Header{Blocks: r.blocks}, cow1.SyncProcess)
	if err != nil {
		r.t.Fatal(err)
	}
	return f, o
}

// fork captures the machine, which goes on, and restores another one from that.
func (r *rig) fork() *rig {
	r.tr.Pause()
	state := r.tr.AppendState(nil)
	next, o := r.overlay()
	if err := r.dev.Freeze(o); err != nil {
		r.t.Fatal(err)
	}
	f := &rig{t: r.t, mem: r.mem.Clone(), clock: &vt.Clock{}, blocks: r.blocks, base: r.base}
	f.layers = append(append(f.layers, r.layers...), r.top)
	r.layers, r.top = append(r.layers, r.top), next
	top, fo := f.overlay()
	f.top = top
	f.attach(fo, rigConfig{})
	if err := f.tr.LoadState(state); err != nil {
		r.t.Fatal(err)
	}
	f.d = r.d.Clone(f.tr, f.mem)
	f.tr.Resume()
	r.tr.Resume()
	return f
}

// cut splits n bytes at addr into up to four buffers.
func cut(r *rand.Rand, addr, n uint64) []vt.Buffer {
	var list []vt.Buffer
	for range 3 {
		if r == nil || n < 2 || r.IntN(2) == 0 {
			continue
		}
		m := 1 + r.Uint64N(n-1)
		list = append(list, vt.Buffer{Addr: addr, Len: m})
		addr, n = addr+m, n-m
	}
	return append(list, vt.Buffer{Addr: addr, Len: n})
}

// request sends one request and returns its status and the data that came back. r makes the layout random.
func (r *rig) request(rnd *rand.Rand, kind uint32, sector uint64, out []byte, in int) (status byte, data []byte) {
	r.t.Helper()
	mark := r.d.Mark()
	defer r.d.Release(mark)
	head := r.d.Alloc(uint64(16+len(out)), 1)
	b := r.d.Bytes(head, uint64(16+len(out)))
	le.PutUint32(b, kind)
	le.PutUint32(b[4:], 0)
	le.PutUint64(b[8:], sector)
	copy(b[16:], out)
	tail := r.d.Alloc(uint64(in+1), 1)
	r.d.Bytes(tail, uint64(in+1))[in] = 0xee
	q := r.d.Queues[0]
	req := vt.Request{Out: cut(rnd, head, uint64(16+len(out))), In: cut(rnd, tail, uint64(in+1)), Indirect: rnd == nil || rnd.IntN(2) == 0}
	h, ok := q.Add(req)
	if !ok {
		r.t.Fatal("ring is full")
	}
	q.Kick()
	u, ok := q.Poll()
	if !ok {
		r.t.Fatalf("request is not done: %v", r.tr.Failure())
	}
	data = bytes.Clone(r.d.Bytes(tail, uint64(in)))
	status = r.d.Bytes(tail, uint64(in+1))[in]
	if u.Head != h || (status == statusOK && in > 0 && kind == typeIn && u.Len != uint32(in+1)) {
		r.t.Fatalf("used %+v for head %d, %d bytes", u, h, in)
	}
	return status, data
}

func segment(sector uint64, count, flags uint32) []byte {
	b := le.AppendUint64(nil, sector)
	return le.AppendUint32(le.AppendUint32(b, count), flags)
}
