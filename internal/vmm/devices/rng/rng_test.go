package rng

import (
	"bytes"
	"testing"

	"forkd.dev/forkd/internal/vmm/virtio"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

func newDriver(t testing.TB) *vt.Driver {
	mem := vt.NewMemory(512<<10, 4096)
	tr, err := virtio.NewTransport(virtio.Config{Name: "rng", Memory: mem, Interrupt: &vt.Line{}}, New())
	if err != nil {
		t.Fatal(err)
	}
	tr.Resume()
	d := vt.NewDriver(tr, mem)
	if err := d.Init(^uint64(0), 8); err != nil {
		t.Fatal(err)
	}
	return d
}

// ask requests n bytes.
func ask(t *testing.T, d *vt.Driver, n uint64) []byte {
	t.Helper()
	at := d.Alloc(n, 1)
	q := d.Queues[0]
	q.Add(vt.Request{In: []vt.Buffer{{Addr: at, Len: n / 2}, {Addr: at + n/2, Len: n - n/2}}})
	q.Kick()
	u, ok := q.Poll()
	if !ok || u.Len == 0 || uint64(u.Len) > n {
		t.Fatalf("used %+v %v: %v", u, ok, d.T.Failure())
	}
	return bytes.Clone(d.Bytes(at, uint64(u.Len)))
}

func TestEntropy(t *testing.T) {
	d := newDriver(t)
	a, b := ask(t, d, 64), ask(t, d, 64)
	if len(a) != 64 || bytes.Equal(a, b) || bytes.Equal(a, make([]byte, 64)) {
		t.Errorf("% x and % x", a, b)
	}
	if n := len(ask(t, d, 10_000)); n != maxRequest {
		t.Errorf("%d bytes at once", n)
	}
}

// TestForkGetsOther: a restored machine does not get what its parent gets.
func TestForkGetsOther(t *testing.T) {
	d := newDriver(t)
	d.T.Pause()
	state := d.T.AppendState(nil)
	mem := d.Mem.Clone()
	tr, err := virtio.NewTransport(virtio.Config{Name: "rng", Memory: mem, Interrupt: &vt.Line{}}, New())
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.LoadState(state); err != nil {
		t.Fatal(err)
	}
	f := d.Clone(tr, mem)
	tr.Resume()
	d.T.Resume()
	if bytes.Equal(ask(t, d, 64), ask(t, f, 64)) {
		t.Error("same bytes")
	}
}

// FuzzEntropy: a hostile guest; a reset makes the device work again.
func FuzzEntropy(f *testing.F) {
	f.Add([]byte{5, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 2, 7, 0, 0, 0x40, 6, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, program []byte) {
		d := newDriver(t)
		d.RunHostile(program[:min(len(program), 100*vt.OpSize)], func(byte) {
			d.T.Pause()
			if err := d.T.LoadState(d.T.AppendState(nil)); err != nil {
				t.Fatal(err)
			}
			d.T.Resume()
		})
		if err := d.Init(^uint64(0), 8); err != nil {
			t.Fatal(err)
		}
		ask(t, d, 64)
	})
}
