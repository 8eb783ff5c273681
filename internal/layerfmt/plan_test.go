package layerfmt

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

// randomLayer writes random extents and does the same to model, a byte slice of
// one byte per unit that holds what the unit is filled with.
func randomLayer(t testing.TB, rng *rand.Rand, model []byte, parent string) *Reader {
	if parent == "" {
		clear(model)
	}
	b := write(t, Header{Units: uint64(len(model)), Parent: parent}, func(w *Writer) error {
		for u := rng.IntN(5); u < len(model); u += rng.IntN(6) {
			n := min(1+rng.IntN(5), len(model)-u)
			fill := byte(rng.IntN(4))
			var err error
			switch {
			case fill == 0 && rng.IntN(2) == 0:
				err = w.Zero(uint64(u), uint64(n))
			case rng.IntN(2) == 0:
				err = w.Put(uint64(u), page(fill, n))
			default:
				err = w.Data(uint64(u), page(fill, n))
			}
			if err != nil {
				return err
			}
			for i := range n {
				model[u+i] = fill
			}
			u += n
		}
		return nil
	})
	return mustOpen(t, b)
}

// assemble builds the memory that a plan describes.
func assemble(t *testing.T, chain []*Reader, plan []Range) []byte {
	t.Helper()
	out := []byte{}
	for i, r := range plan {
		if r.Unit != uint64(len(out)/DefaultUnitSize) || r.Count == 0 {
			t.Fatalf("range %d %+v after %d units", i, r, len(out)/DefaultUnitSize)
		}
		b := make([]byte, r.Count*DefaultUnitSize)
		if r.Layer != ZeroLayer {
			if err := readFull(chain[r.Layer].src, b, r.Offset); err != nil {
				t.Fatal(err)
			}
		} else if i > 0 && plan[i-1].Layer == ZeroLayer {
			t.Fatalf("zero ranges %d and %d are not joined", i-1, i)
		}
		out = append(out, b...)
	}
	return out
}

func TestPlanAgainstModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 300 {
		model := make([]byte, 1+rng.IntN(60))
		var chain []*Reader
		for depth := range 1 + rng.IntN(8) {
			parent := parentID
			if depth == 0 || rng.IntN(10) == 0 { // a flattened layer hides what is below
				parent = ""
			}
			chain = append(chain, randomLayer(t, rng, model, parent))
		}
		plan, err := Plan(chain)
		if err != nil {
			t.Fatal(err)
		}
		got := assemble(t, chain, plan)
		if len(got) != len(model)*DefaultUnitSize {
			t.Fatalf("round %d: plan covers %d of %d units", round, len(got)/DefaultUnitSize, len(model))
		}
		for u, fill := range model {
			if !bytes.Equal(got[u*DefaultUnitSize:(u+1)*DefaultUnitSize], page(fill, 1)) {
				t.Fatalf("round %d: unit %d is wrong, want %d", round, u, fill)
			}
		}
	}
}

func TestPlanRefuses(t *testing.T) {
	layer := func(units uint64, parent string) *Reader {
		return mustOpen(t, write(t, Header{Units: units, Parent: parent}, func(*Writer) error { return nil }))
	}
	if _, err := Plan(nil); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("empty chain: %v", err)
	}
	if _, err := Plan([]*Reader{layer(4, parentID)}); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("no root: %v", err)
	}
	if _, err := Plan([]*Reader{layer(4, ""), layer(5, parentID)}); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("other length: %v", err)
	}
}

// scattered has count single-unit extents over a memory of units.
func scattered(b *testing.B, rng *rand.Rand, units, count int, parent string) *Reader {
	data := write(b, Header{Units: uint64(units), Parent: parent}, func(w *Writer) error {
		p := page(1, 1)
		for i := range count {
			binary.LittleEndian.PutUint64(p, rng.Uint64())
			if err := w.Data(uint64(i*(units/count)+rng.IntN(units/count)), p); err != nil {
				return err
			}
		}
		return nil
	})
	return mustOpen(b, data)
}

func BenchmarkPlan(b *testing.B) {
	const units = 131072 // 512 MiB
	for _, depth := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("depth=%d", depth), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(1, 2))
			chain := []*Reader{scattered(b, rng, units, 4096, "")}
			for len(chain) < depth {
				chain = append(chain, scattered(b, rng, units, 512, parentID))
			}
			b.ResetTimer()
			for b.Loop() {
				if _, err := Plan(chain); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkWriter(b *testing.B) {
	const pages = 4096
	data := make([]byte, pages*DefaultUnitSize)
	for i := range pages {
		if i%4 != 0 { // a quarter is zero
			data[i*DefaultUnitSize] = 1
		}
	}
	f := &memFile{b: make([]byte, 2*len(data))}
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		f.pos = 0
		w, err := NewWriter(f, Header{Units: pages})
		if err != nil {
			b.Fatal(err)
		}
		if err := errors.Join(w.Put(0, data), w.Close()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	r := scattered(b, rand.New(rand.NewPCG(1, 2)), 131072, 16384, "")
	for b.Loop() {
		if _, err := Open(r.src, r.stats.FileBytes); err != nil {
			b.Fatal(err)
		}
	}
}
