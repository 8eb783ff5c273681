package virtio_test

import (
	"encoding/binary"
	"errors"
	"fmt"

	"forkd.dev/forkd/internal/vmm/virtio"
	"forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

// echo is a device that answers each request with its bytes inverted. While held it takes
// requests and gives them back.
type echo struct {
	bus    virtio.Bus
	chain  virtio.Chain
	held   bool
	count  uint64
	starts int
	resets int
}

func (e *echo) Attach(b virtio.Bus)        { e.bus = b }
func (e *echo) Type() uint32               { return 42 }
func (e *echo) Features() uint64           { return 1 << 5 }
func (e *echo) QueueSizes() []uint16       { return []uint16{64, 16} }
func (e *echo) WriteConfig([]byte, uint32) {}
func (e *echo) Start()                     { e.starts++ }
func (e *echo) Reset()                     { e.resets++; e.count = 0 }
func (e *echo) ResetQueue(int)             {}
func (e *echo) ReadConfig(p []byte, off uint32) {
	if off < 4 {
		copy(p, []byte("echo")[off:])
	}
}

func (e *echo) Process(i int) error {
	q := e.bus.Queue(i)
	for {
		ok, err := q.Pop(&e.chain)
		if err != nil || !ok {
			return err
		}
		if e.held {
			q.Return()
			return nil
		}
		q.Push(e.chain.Head, invert(&e.chain))
		e.count++
	}
}

func invert(c *virtio.Chain) (n uint32) {
	in, out := 0, 0
	for in < len(c.Readable) && out < len(c.Writable) {
		src, dst := c.Readable[in], c.Writable[out]
		m := min(len(src), len(dst))
		for i := range m {
			dst[i] = ^src[i]
		}
		c.Readable[in], c.Writable[out] = src[m:], dst[m:]
		if len(src) == m {
			in++
		}
		if len(dst) == m {
			out++
		}
		n += uint32(m)
	}
	return n
}

func (e *echo) AppendState(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, 1)
	return binary.LittleEndian.AppendUint64(b, e.count)
}

func (e *echo) LoadState(b []byte) error {
	if len(b) != 10 || b[0] != 1 {
		return errors.New("bad echo state")
	}
	e.count = binary.LittleEndian.Uint64(b[2:])
	return nil
}

// rig is a machine with one echo device.
type rig struct {
	mem  *virtiotest.Memory
	line *virtiotest.Line
	dev  *echo
	t    *virtio.Transport
	d    *virtiotest.Driver
}

func newRig(memory int) *rig {
	r := &rig{mem: virtiotest.NewMemory(memory, 1<<16)}
	r.attach()
	r.d = virtiotest.NewDriver(r.t, r.mem)
	r.t.Resume()
	return r
}

func (r *rig) attach() {
	r.line = &virtiotest.Line{}
	r.attachTo(r.line)
}

func (r *rig) attachTo(line virtio.Interrupter) {
	r.dev = &echo{}
	t, err := virtio.NewTransport(virtio.Config{Name: "echo", Memory: r.mem, Interrupt: line}, r.dev)
	if err != nil {
		panic(fmt.Sprint("new transport: ", err))
	}
	r.t = t
	if r.d != nil {
		r.d.T = t
		t.Resume()
	}
}

// fork saves the machine and returns one that was restored from that.
func (r *rig) fork() (*rig, error) {
	r.t.Pause()
	state := r.t.AppendState(nil)
	f := &rig{mem: r.mem.Clone()}
	f.attach()
	f.dev.held = r.dev.held
	if err := f.t.LoadState(state); err != nil {
		return nil, err
	}
	f.d = r.d.Clone(f.t, f.mem)
	f.line.Take()
	f.t.Resume()
	return f, nil
}
