//go:build !race

// Guest memory is shared with a guest that knows no Go memory model, so the race
// detector is right about it and of no use here.

package virtio_test

import (
	"testing"

	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

// TestNoLostWakeup: driver and device run at the same time and each sleeps until the other
// one wakes it, so one notification or interrupt that is missing hangs the test.
func TestNoLostWakeup(t *testing.T) {
	r := newRig(1 << 20)
	line := &wakeLine{c: make(chan struct{}, 1)}
	r.attachTo(line)
	if err := r.d.Init(allFeatures, 16); err != nil {
		t.Fatal(err)
	}
	r.d.Mute = true
	doorbell, done := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(done)
		for range doorbell {
			r.t.KickAll()
		}
	}()
	q := r.d.Queues[0]
	at := r.d.Alloc(8192, 4096)
	const requests = 200_000
	for sent, got := 0, 0; got < requests; {
		for sent < requests {
			if _, ok := q.Add(vt.Request{Out: []vt.Buffer{{Addr: at, Len: 8}}, In: []vt.Buffer{{Addr: at + 4096, Len: 8}}}); !ok {
				break
			}
			sent++
			before := r.d.Notified
			if q.Kick(); r.d.Notified > before {
				select {
				case doorbell <- struct{}{}:
				default:
				}
			}
		}
		n := 0
		for _, ok := q.Poll(); ok; _, ok = q.Poll() {
			n++
		}
		if got += n; n == 0 {
			<-line.c
			r.d.Interrupted()
		}
	}
	close(doorbell)
	<-done
}

type wakeLine struct{ c chan struct{} }

func (l *wakeLine) Raise() {
	select {
	case l.c <- struct{}{}:
	default:
	}
}
