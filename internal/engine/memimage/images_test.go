package memimage

import (
	"slices"
	"testing"

	"forkd.dev/forkd/internal/linux"
)

// TestSurplus: beyond the limit the images go that were used longest ago; never one
// that a machine maps or a call uses.
func TestSurplus(t *testing.T) {
	const mib = 1 << 20
	r := NewImages(2 * mib)
	filled := func(id string) {
		f, err := linux.MemFile(FileName, mib)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(slices.Repeat([]byte{1}, mib), 0); err != nil {
			t.Fatal(err)
		}
		r.Put(id, f)
	}
	for _, id := range []string{"a", "b", "c", "d"} {
		filled(id)
	}
	names := func() (out []string) {
		for id := range r.images {
			out = append(out, id)
		}
		slices.Sort(out)
		return out
	}
	f, release := r.Peek("a") // a is in use, and so the youngest
	if f == nil {
		t.Fatal("a is not built")
	}
	gone := r.surplus(map[string]int{"b": 1})
	if got := names(); len(gone) != 2 || !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("%d are gone, left are %v", len(gone), got)
	}
	for _, img := range gone {
		img.drop()
	}
	if _, err := f.ReadAt(make([]byte, 1), 0); err != nil {
		t.Errorf("the image in use: %v", err)
	}
	filled("e")
	if gone := r.surplus(map[string]int{"b": 1, "e": 1}); len(gone) != 0 {
		t.Errorf("%d are gone that are in use", len(gone))
	}
	release()
	if gone := r.surplus(map[string]int{"b": 1, "e": 1}); len(gone) != 1 {
		t.Errorf("%d are gone, want a", len(gone))
	}
	if f, release := r.Peek("a"); f != nil {
		t.Error("a is still there")
	} else {
		release()
	}
	r.Close()
}
