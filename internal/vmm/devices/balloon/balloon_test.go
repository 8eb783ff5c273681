package balloon

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/virtio"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

var le = binary.LittleEndian

type dropRange struct{ addr, n uint64 }

// recorder is a Dropper that fails the test for what it must never be asked.
type recorder struct {
	t      testing.TB
	mem    *vt.Memory
	ranges []dropRange
}

func (r *recorder) Drop(addr, n uint64) error {
	if _, err := r.mem.Slice(addr, n); err != nil || addr%pageSize != 0 || n%pageSize != 0 || n == 0 {
		r.t.Fatalf("drop of %#x+%#x", addr, n)
	}
	r.ranges = append(r.ranges, dropRange{addr, n})
	return nil
}

func newBalloon(t testing.TB) (*vt.Driver, *Device, *recorder) {
	mem := vt.NewMemory(1<<20, 64<<10)
	r := &recorder{t: t, mem: mem}
	b, err := New(Config{Memory: mem, Dropper: r})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := virtio.NewTransport(virtio.Config{Name: "balloon", Memory: mem, Interrupt: &vt.Line{}}, b)
	if err != nil {
		t.Fatal(err)
	}
	tr.Resume()
	d := vt.NewDriver(tr, mem)
	if err := d.Init(^uint64(0), 32); err != nil {
		t.Fatal(err)
	}
	return d, b, r
}

func inflate(d *vt.Driver, pages ...uint32) bool {
	at := d.Alloc(uint64(4*len(pages)), 4)
	for i, p := range pages {
		le.PutUint32(d.Bytes(at+uint64(4*i), 4), p)
	}
	q := d.Queues[inflateQueue]
	q.Add(vt.Request{Out: []vt.Buffer{{Addr: at, Len: uint64(4 * len(pages))}}})
	q.Kick()
	_, ok := q.Poll()
	return ok
}

func TestInflate(t *testing.T) {
	d, b, r := newBalloon(t)
	b.SetTarget(7)
	if d.Interrupted()&2 == 0 || le.Uint32(d.Config(0, 4)) != 7 {
		t.Error("the guest does not learn of the target")
	}
	if !inflate(d, 200, 201, 202, 150, 149, 148, 100) {
		t.Fatal(d.T.Failure())
	}
	want := []dropRange{{200 * pageSize, 3 * pageSize}, {148 * pageSize, 3 * pageSize}, {100 * pageSize, pageSize}}
	if !slices.Equal(r.ranges, want) {
		t.Errorf("dropped %v", r.ranges)
	}
	d.T.Write(vt.RegConfig+4, []byte{7, 0, 0, 0})
	if pages, bytes := b.Counters(); pages != 7 || bytes != 7*pageSize {
		t.Errorf("%d pages, %d bytes", pages, bytes)
	}
}

func TestPagesOutside(t *testing.T) {
	for _, page := range []uint32{256, 1 << 20, ^uint32(0)} {
		d, _, r := newBalloon(t)
		if page == 1<<20 { // the high memory is there
			if !inflate(d, page) || len(r.ranges) != 1 {
				t.Error("a page at 4 GiB is refused")
			}
			continue
		}
		if inflate(d, page) || !errors.Is(d.T.Failure(), errdefs.ErrGuest) || len(r.ranges) > 0 {
			t.Errorf("page %#x: %v, dropped %v", page, d.T.Failure(), r.ranges)
		}
	}
}

func TestReporting(t *testing.T) {
	d, _, r := newBalloon(t)
	q := d.Queues[reportQueue]
	q.Add(vt.Request{In: []vt.Buffer{{Addr: 512 << 10, Len: 128 << 10}, {Addr: 700<<10 + 5, Len: 9000}, {Addr: 5, Len: 100}}})
	q.Kick()
	if _, ok := q.Poll(); !ok {
		t.Fatal(d.T.Failure())
	}
	if want := []dropRange{{512 << 10, 128 << 10}, {704 << 10, pageSize}}; !slices.Equal(r.ranges, want) {
		t.Errorf("dropped %v, want %v", r.ranges, want)
	}
}

func TestState(t *testing.T) {
	d, b, _ := newBalloon(t)
	b.SetTarget(5)
	d.T.Write(vt.RegConfig+4, []byte{3, 0, 0, 0})
	d.T.Pause()
	state := d.T.AppendState(nil)
	_, f, _ := newBalloon(t)
	if err := f.LoadState(b.AppendState(nil)); err != nil {
		t.Fatal(err)
	}
	if p, _ := f.Counters(); p != 3 || f.target.Load() != 5 {
		t.Errorf("%d pages, target %d", p, f.target.Load())
	}
	if err := d.T.LoadState(state); err != nil {
		t.Fatal(err)
	}
}

// FuzzBalloon: whatever a hostile guest names, only whole pages of its own memory are dropped.
func FuzzBalloon(f *testing.F) {
	f.Add([]byte{5, 0, 0, 2, 5, 0, 0, 0, 4, 2, 0, 1, 0, 0, 0, 0x40, 6, 2, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, program []byte) {
		d, _, _ := newBalloon(t)
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
		if !inflate(d, 200) {
			t.Fatal(d.T.Failure())
		}
	})
}

func TestGoldenState(t *testing.T) {
	_, b, _ := newBalloon(t)
	b.SetTarget(0x1234)
	b.actual.Store(0x99)
	if err := b.LoadState(vt.Golden(t, "balloon_v1", b.AppendState(nil))); err != nil {
		t.Fatal(err)
	}
}
