package block

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	vt "forkd.dev/forkd/internal/vmm/virtio/virtiotest"
)

// allocated is how many sectors a file takes.
func allocated(f *os.File) (int64, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return st.Blocks, err
}

// FuzzDisk: a hostile guest at the disk. Afterwards a reset makes the disk work again, and the host has
// lost no more space than the disk has.
func FuzzDisk(f *testing.F) {
	f.Add([]byte{5, 0, 0, 0, 1, 0, 0, 0})
	f.Add([]byte{5, 0, 0, 0xff, 0, 0, 0, 0, 5, 0, 8, 0, 7, 0, 0, 0})
	f.Add([]byte{5, 0, 0, 6, 11, 0, 0, 0, 5, 0, 0, 2, 13, 0, 0, 0})
	f.Fuzz(func(t *testing.T, program []byte) {
		r := newRig(t, rigConfig{blocks: 64, base: make([]byte, 8192), memory: 512 << 10})
		r.d.RunHostile(program[:min(len(program), 100*vt.OpSize)], func(n byte) {
			r.tr.Pause()
			state := r.tr.AppendState(nil)
			if n%2 == 0 {
				next, o := r.overlay()
				if err := r.dev.Freeze(o); err != nil {
					t.Fatal(err)
				}
				r.layers, r.top = append(r.layers, r.top), next
			}
			if err := r.tr.LoadState(state); err != nil {
				t.Fatal(err)
			}
			r.tr.Resume()
		})
		if err := r.d.Init(allFeatures, 16); err != nil {
			t.Fatalf("a reset does not help: %v", err)
		}
		if s, _ := r.request(nil, typeOut, 8, make([]byte, 4096), 0); s != statusOK {
			t.Fatalf("status %d", s)
		}
		st, err := r.top.Stat()
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() > (1+2+64)*4096 {
			t.Fatalf("overlay has %d bytes", st.Size())
		}
	})
}
