package bus

import (
	"bytes"
	"errors"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

type ram []byte

func (r ram) Read(offset uint64, p []byte)  { copy(p, r[offset:]) }
func (r ram) Write(offset uint64, p []byte) { copy(r[offset:], p) }

func TestBus(t *testing.T) {
	var b Bus
	first, second := make(ram, 16), make(ram, 8)
	if err := errors.Join(b.Add(0x200, 8, second), b.Add(0x100, 16, first)); err != nil {
		t.Fatal(err)
	}
	for _, w := range [][2]uint64{{0xf8, 9}, {0x10f, 1}, {0x1ff, 2}, {0x204, 100}, {0x300, 0}, {^uint64(0), 2}} {
		if err := b.Add(w[0], w[1], first); err == nil {
			t.Errorf("window %#x is accepted", w)
		}
	}
	if err := b.Add(0x104, 1, first); !errors.Is(err, errdefs.ErrConflict) {
		t.Errorf("taken window: %v", err)
	}
	b.Write(0x204, []byte{1, 2, 3, 4})
	got := make([]byte, 4)
	if b.Read(0x204, got); !bytes.Equal(got, []byte{1, 2, 3, 4}) || second[4] != 1 {
		t.Errorf("read %v", got)
	}
	// Beyond a window, between windows, across its end: ones, and no write.
	for _, a := range []uint64{0, 0xff, 0x10e, 0x110, 0x208, ^uint64(0)} {
		b.Write(a, []byte{9, 9, 9, 9})
		if b.Read(a, got); !bytes.Equal(got, []byte{255, 255, 255, 255}) {
			t.Errorf("at %#x: %v", a, got)
		}
	}
	if first[14] != 0 {
		t.Error("an access across the end was carried out")
	}
}
