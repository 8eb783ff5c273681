package qemu

import "testing"

// TestArenas: the room of the last capture serves the next, unless it is too small, and
// what is too large to keep is not kept.
func TestArenas(t *testing.T) {
	var a arenas
	take := func(size int) []byte {
		t.Helper()
		b, err := a.take(size, size)
		if err != nil || len(b) < size {
			t.Fatalf("take %d bytes: %d, %v", size, len(b), err)
		}
		return b
	}
	first := take(1 << 20)
	a.give(first)
	if got := a.keptKiB(); got != 1024 {
		t.Errorf("%d KiB are kept", got)
	}
	if again := take(1 << 19); &again[0] != &first[0] {
		t.Error("what was kept is not used again")
	} else {
		a.give(again)
	}
	roomy, err := a.take(1<<20+4096, 1<<20+8192)
	if err != nil || len(roomy) != 1<<20+8192 {
		t.Errorf("room for 1 MiB and two pages has %d bytes, %v", len(roomy), err)
	}
	a.give(roomy)
	if again, err := a.take(1<<20+4096, 1<<22); err != nil || &again[0] != &roomy[0] {
		t.Errorf("what is kept and large enough is not used (%v)", err)
	} else {
		a.give(again)
	}
	larger := take(1 << 21)
	a.give(larger)
	if got := a.keptKiB(); got != 2048 {
		t.Errorf("%d KiB are kept, the larger of two is worth more", got)
	}
	a.give(take(keptArena + 4096))
	if got := a.keptKiB(); got != 2048 {
		t.Errorf("%d KiB are kept after a huge one", got)
	}
	a.drop()
	a.drop()
	if got := a.keptKiB(); got != 0 {
		t.Errorf("%d KiB are kept after a drop", got)
	}
}
