package virtio_test

import (
	"testing"

	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

// FuzzQueue: a hostile guest at registers and rings. Afterwards a reset makes the device
// work again.
func FuzzQueue(f *testing.F) {
	f.Add([]byte{3, 0, 0, 1, 0, 0, 0, 0x20, 6, 0, 0, 0, 0, 0, 0, 0}, uint8(64))
	f.Add([]byte{7, 0, 0, 0, 0xff, 0xff, 0, 0, 11, 1, 0, 0, 0, 0, 0, 0}, uint8(4))
	f.Add([]byte{0, 28, 0, 0, 0, 0, 0, 0, 5, 0, 3, 9, 1, 2, 3, 4}, uint8(16))
	f.Add([]byte{4, 0, 0, 0xfe, 7, 0, 0, 0x80, 6, 0, 0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0}, uint8(64))
	f.Fuzz(func(t *testing.T, program []byte, size uint8) {
		r := newRig(512 << 10)
		if err := r.d.Init(allFeatures, 1<<(size%7)); err != nil {
			t.Fatal(err)
		}
		r.d.RunHostile(program[:min(len(program), 200*vt.OpSize)], func(n byte) {
			switch n % 3 {
			case 0:
				r.dev.held = !r.dev.held
			case 1:
				reload(t, r)
			default:
				r.t.Pause()
				r.t.Resume()
			}
		})
		r.dev.held = false
		if err := r.d.Init(allFeatures, 16); err != nil {
			t.Fatalf("a reset does not help: %v", err)
		}
		roundTrip(t, r, 0, 10, true)
	})
}

// reload saves the device and loads it again.
func reload(t *testing.T, r *rig) {
	r.t.Pause()
	state := r.t.AppendState(nil)
	if err := r.t.LoadState(state); err != nil {
		t.Fatalf("state is refused by the build that wrote it: %v", err)
	}
	r.t.Resume()
}

// FuzzLoadState: a state file may hold anything.
func FuzzLoadState(f *testing.F) {
	r := newRig(512 << 10)
	if err := r.d.Init(allFeatures, 16); err != nil {
		f.Fatal(err)
	}
	r.t.Pause()
	f.Add(r.t.AppendState(nil))
	fresh := newRig(4096)
	fresh.t.Pause()
	f.Add(fresh.t.AppendState(nil))
	f.Fuzz(func(t *testing.T, state []byte) {
		r := newRig(512 << 10)
		r.t.Pause()
		if r.t.LoadState(state) == nil {
			r.t.Resume()
			r.t.KickAll()
			reload(t, r)
		}
	})
}
