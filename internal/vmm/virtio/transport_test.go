package virtio_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/virtio"
	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

const allFeatures = ^uint64(0)

func TestNegotiation(t *testing.T) {
	r := newRig(1 << 20)
	if err := r.d.Init(allFeatures, 64); err != nil {
		t.Fatal(err)
	}
	want := uint64(1<<5 | virtio.FeatureVersion1 | virtio.FeatureIndirect | virtio.FeatureEventIdx | virtio.FeatureRingReset)
	if r.d.Features != want {
		t.Errorf("features %#x, want %#x", r.d.Features, want)
	}
	if r.dev.starts != 1 || len(r.d.Queues) != 2 || r.d.Queues[1].Size != 16 {
		t.Errorf("started %d times, %d queues", r.dev.starts, len(r.d.Queues))
	}
	if got := string(r.d.Config(0, 6)); got != "echo\x00\x00" {
		t.Errorf("config %q", got)
	}
	// Features are settled now.
	r.d.SetReg(vt.RegDriverSel, 0)
	r.d.SetReg(vt.RegDriverFeatures, 0)
	roundTrip(t, r, 0, 5, true)
	r.d.SetReg(vt.RegStatus, 0)
	if r.dev.resets < 2 || r.d.Reg(vt.RegStatus) != 0 {
		t.Error("no reset")
	}
}

func TestRefusedFeatures(t *testing.T) {
	for name, set := range map[string][2]uint32{
		"no version 1":  {0, 0},
		"never offered": {1 << 6, 1},
	} {
		r := newRig(1 << 20)
		r.d.SetReg(vt.RegStatus, vt.StatusAcknowledge|vt.StatusDriver)
		for sel, v := range set {
			r.d.SetReg(vt.RegDriverSel, uint32(sel))
			r.d.SetReg(vt.RegDriverFeatures, v)
		}
		r.d.SetReg(vt.RegStatus, vt.StatusAcknowledge|vt.StatusDriver|vt.StatusFeaturesOK)
		if r.d.Reg(vt.RegStatus)&vt.StatusFeaturesOK != 0 {
			t.Errorf("%s: accepted", name)
		}
		r.d.SetReg(vt.RegStatus, 15)
		if s := r.d.Reg(vt.RegStatus); s&vt.StatusNeedsReset == 0 || !errors.Is(r.t.Failure(), errdefs.ErrGuest) {
			t.Errorf("%s: status %#x, failure %v", name, s, r.t.Failure())
		}
	}
}

// roundTrip sends n bytes through a queue and checks the answer.
func roundTrip(t *testing.T, r *rig, queue, n int, indirect bool) {
	t.Helper()
	mark := r.d.Mark()
	out, in := r.d.Alloc(uint64(n), 1), r.d.Alloc(uint64(n), 1)
	for i := range n {
		r.d.Bytes(out, uint64(n))[i] = byte(i * 7)
	}
	q := r.d.Queues[queue]
	head, ok := q.Add(vt.Request{Out: []vt.Buffer{{Addr: out, Len: uint64(n)}}, In: []vt.Buffer{{Addr: in, Len: uint64(n)}}, Indirect: indirect})
	if !ok {
		t.Fatal("ring is full")
	}
	q.Kick()
	u, ok := q.Poll()
	if !ok || u.Head != head || u.Len != uint32(n) {
		t.Fatalf("used %+v %v, want head %d", u, ok, head)
	}
	for i, b := range r.d.Bytes(in, uint64(n)) {
		if b != ^byte(i*7) {
			t.Fatalf("byte %d is %#x", i, b)
		}
	}
	r.d.Release(mark)
}

// TestIndexWrap goes three times round all 16-bit indexes, with and without event index.
func TestIndexWrap(t *testing.T) {
	for _, features := range []uint64{allFeatures, allFeatures &^ virtio.FeatureEventIdx} {
		r := newRig(1 << 20)
		if err := r.d.Init(features, 16); err != nil {
			t.Fatal(err)
		}
		for i := range 3 << 16 {
			roundTrip(t, r, 0, 1+i%9, i%2 == 0)
			if r.line.Take() != 1 {
				t.Fatalf("request %d: no single interrupt", i)
			}
			if r.d.Interrupted() != 1 {
				t.Fatal("no cause")
			}
		}
	}
}

// TestEventIndex: with a driver that asks to hear only of the tenth answer, there is one interrupt.
func TestEventIndex(t *testing.T) {
	r := newRig(1 << 20)
	if err := r.d.Init(allFeatures, 64); err != nil {
		t.Fatal(err)
	}
	q := r.d.Queues[0]
	q.WantInterrupt(9)
	at := r.d.Alloc(8, 1)
	interrupts := 0
	for range 20 {
		q.Add(vt.Request{In: []vt.Buffer{{Addr: at, Len: 8}}})
		q.Kick()
		interrupts += r.line.Take()
	}
	if interrupts != 1 || r.d.Notified != 20 {
		t.Errorf("%d interrupts, %d notifications", interrupts, r.d.Notified)
	}
	// The device is busy (here: paused): one notification is enough.
	r.t.Pause()
	r.d.Notified = 0
	for range 10 {
		q.Add(vt.Request{In: []vt.Buffer{{Addr: at, Len: 8}}})
		q.Kick()
	}
	if r.d.Notified != 1 {
		t.Errorf("%d notifications of a busy device", r.d.Notified)
	}
	r.t.Resume()
	if got := r.dev.count; got != 30 {
		t.Errorf("%d requests done after Resume", got)
	}
}

func TestQueueReset(t *testing.T) {
	r := newRig(1 << 20)
	if err := r.d.Init(allFeatures, 64); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, r, 0, 3, false)
	r.dev.held = true
	q := r.d.Queues[0]
	at := r.d.Alloc(8, 1)
	q.Add(vt.Request{In: []vt.Buffer{{Addr: at, Len: 8}}})
	q.Kick()
	r.d.SetReg(vt.RegQueueSel, 0)
	r.d.SetReg(vt.RegQueueReset, 1)
	if r.d.Reg(vt.RegQueueReset) != 0 || r.d.Reg(vt.RegQueueReady) != 0 {
		t.Fatal("queue is still in use")
	}
	r.dev.held = false
	r.t.KickAll()
	if r.dev.count != 1 {
		t.Fatal("a request of a queue that was reset has been done")
	}
	roundTrip(t, r, 1, 3, false)
	q.Restart()
	roundTrip(t, r, 0, 3, true)
}

func TestPendingInterruptSurvives(t *testing.T) {
	r := newRig(1 << 20)
	if err := r.d.Init(allFeatures, 64); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, r, 0, 3, false)
	r.t.Pause()
	state := r.t.AppendState(nil)
	f := &rig{mem: r.mem.Clone()}
	f.attach()
	if err := f.t.LoadState(state); err != nil {
		t.Fatal(err)
	}
	f.t.Resume()
	if f.line.Take() != 1 {
		t.Error("an interrupt that was not acknowledged is lost")
	}
	if again := f.t.AppendState(nil); !bytes.Equal(again, state) {
		t.Error("state differs after a round trip")
	}
}

func TestBadStateIsRefused(t *testing.T) {
	r := newRig(1 << 20)
	if err := r.d.Init(allFeatures, 64); err != nil {
		t.Fatal(err)
	}
	r.t.Pause()
	state := r.t.AppendState(nil)
	for n := range state {
		if err := r.t.LoadState(state[:n]); err == nil {
			t.Fatalf("%d of %d bytes were accepted", n, len(state))
		}
	}
	if err := r.t.LoadState(append(bytes.Clone(state), 0)); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Fatalf("a byte too many: %v", err)
	}
	small := &rig{mem: vt.NewMemory(4096, 0)}
	small.attach()
	if err := small.t.LoadState(state); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Fatalf("queues outside of memory: %v", err)
	}
	if err := r.t.LoadState(state); err != nil {
		t.Fatal(err)
	}
	r.t.Resume()
	roundTrip(t, r, 0, 9, true)
}

// TestRandomRequests runs random requests with random layouts, pauses and resets, and forks the machine
// at every step: both sides must do the same, byte by byte.
func TestRandomRequests(t *testing.T) {
	seeds := 60
	if testing.Short() {
		seeds = 10
	}
	for seed := range seeds {
		run := &randomRun{t: t, r: rand.New(rand.NewPCG(uint64(seed), 1)), open: map[[2]int]sent{}}
		run.rig = newRig(1 << 20)
		features := allFeatures
		if seed%3 == 0 {
			features &^= virtio.FeatureEventIdx
		}
		if seed%4 == 0 {
			features &^= virtio.FeatureIndirect
		}
		if err := run.rig.d.Init(features, []uint16{4, 16, 64}[seed%3]); err != nil {
			t.Fatal(err)
		}
		for range 400 {
			run.step()
		}
	}
}

type sent struct {
	in   []vt.Buffer
	want []byte
}

type randomRun struct {
	t    *testing.T
	r    *rand.Rand
	rig  *rig
	open map[[2]int]sent // by queue and head
}

func (x *randomRun) step() {
	op, seed := x.r.IntN(10), x.r.Uint64()
	if x.r.IntN(8) == 0 {
		// A fork made before the step goes the same way.
		f, err := x.rig.fork()
		if err != nil {
			x.t.Fatal(err)
		}
		x.rig.t.Resume()
		other := &randomRun{t: x.t, rig: f, open: map[[2]int]sent{}}
		for k, v := range x.open {
			other.open[k] = v
		}
		other.do(op, seed)
		x.do(op, seed)
		if !f.mem.Equal(x.rig.mem) {
			x.t.Fatal("memory of source and fork differ")
		}
		if x.r.IntN(2) == 0 {
			*x = randomRun{t: x.t, r: x.r, rig: f, open: other.open}
		}
		return
	}
	x.do(op, seed)
}

func (x *randomRun) do(op int, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 2))
	q := x.rig.d.Queues[r.IntN(2)]
	switch {
	case op < 5:
		x.add(q, r)
		if r.IntN(2) == 0 {
			q.Kick()
		}
	case op < 8:
		q.Kick()
		for {
			u, ok := q.Poll()
			if !ok {
				break
			}
			x.verify(q, u)
		}
		if q.Outstanding() > 0 && !x.rig.dev.held {
			x.t.Fatalf("%d requests are lost", q.Outstanding())
		}
		if len(x.open) == 0 {
			x.rig.d.Release(64 << 10)
		}
	case op == 8:
		x.rig.dev.held = !x.rig.dev.held
		x.rig.t.KickAll()
	default:
		x.rig.t.Pause()
		x.add(q, r)
		q.Kick()
		x.rig.t.Resume()
	}
}

func (x *randomRun) add(q *vt.Queue, r *rand.Rand) {
	if x.rig.d.Mark() > 900<<10 {
		return
	}
	var req vt.Request
	var all, want []byte
	for range r.IntN(4) {
		n := uint64(1 + r.IntN(300))
		at := x.rig.d.Alloc(n, 1)
		for i := range x.rig.d.Bytes(at, n) {
			x.rig.d.Bytes(at, n)[i] = byte(r.Uint32())
		}
		all = append(all, x.rig.d.Bytes(at, n)...)
		req.Out = append(req.Out, vt.Buffer{Addr: at, Len: n})
	}
	for range r.IntN(4) {
		n := uint64(1 + r.IntN(300))
		at := x.rig.d.Alloc(n, 1)
		req.In = append(req.In, vt.Buffer{Addr: at, Len: n})
	}
	if len(req.Out)+len(req.In) == 0 {
		return
	}
	space := uint64(0)
	for _, b := range req.In {
		space += b.Len
	}
	for _, b := range all[:min(uint64(len(all)), space)] {
		want = append(want, ^b)
	}
	req.Indirect = x.rig.d.Features&virtio.FeatureIndirect != 0 && r.IntN(2) == 0
	if head, ok := q.Add(req); ok {
		x.open[[2]int{q.Index, int(head)}] = sent{req.In, want}
	}
}

func (x *randomRun) verify(q *vt.Queue, u vt.Used) {
	key := [2]int{q.Index, int(u.Head)}
	s, ok := x.open[key]
	if !ok {
		x.t.Fatalf("queue %d: head %d was used twice", q.Index, u.Head)
	}
	delete(x.open, key)
	if int(u.Len) != len(s.want) {
		x.t.Fatalf("%d bytes written, want %d", u.Len, len(s.want))
	}
	var got []byte
	for _, b := range s.in {
		got = append(got, x.rig.d.Bytes(b.Addr, b.Len)...)
	}
	if !bytes.Equal(got[:len(s.want)], s.want) {
		x.t.Fatal("wrong answer")
	}
}

// TestGoldenState: a state written by an older build of this version loads and does what it says.
func TestGoldenState(t *testing.T) {
	r := newRig(1 << 20)
	if err := r.d.Init(allFeatures, 16); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, r, 0, 3, false)
	r.t.Pause()
	state := vt.Golden(t, "transport_v1", r.t.AppendState(nil))
	if err := r.t.LoadState(state); err != nil {
		t.Fatal(err)
	}
	r.t.Resume()
	roundTrip(t, r, 0, 3, false)
}
