package virtio_test

import (
	"testing"

	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

// BenchmarkRequest is one request of 4 KiB through ring, doorbell register and back, the
// driver's part included.
func BenchmarkRequest(b *testing.B) {
	r := newRig(1 << 20)
	if err := r.d.Init(allFeatures, 64); err != nil {
		b.Fatal(err)
	}
	q := r.d.Queues[0]
	at := r.d.Alloc(8192, 4096)
	head, _ := q.Add(vt.Request{Out: []vt.Buffer{{Addr: at, Len: 16}}, In: []vt.Buffer{{Addr: at + 4096, Len: 1}}})
	b.ReportAllocs()
	for b.Loop() {
		q.Kick()
		q.LastUsed++
		q.WantInterrupt(q.LastUsed)
		q.Offer(head)
	}
}

// TestNoAllocations: the hot path of queue and transport allocates nothing.
func TestNoAllocations(t *testing.T) {
	r := newRig(1 << 20)
	if err := r.d.Init(allFeatures, 64); err != nil {
		t.Fatal(err)
	}
	q := r.d.Queues[0]
	at := r.d.Alloc(8192, 4096)
	head, _ := q.Add(vt.Request{Out: []vt.Buffer{{Addr: at, Len: 16}}, In: []vt.Buffer{{Addr: at + 4096, Len: 1}}})
	done := r.dev.count
	if n := testing.AllocsPerRun(1000, func() {
		q.Show()
		r.t.Kick(0)
		q.Offer(head)
	}); n != 0 {
		t.Errorf("%v allocations per request", n)
	}
	if r.dev.count-done < 1000 {
		t.Errorf("only %d requests", r.dev.count-done)
	}
}
