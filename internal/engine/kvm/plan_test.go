package kvm

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmwire"
)

// TestPlanMemory: whatever a chain holds, a machine that follows the plan has the memory that
// its layers describe.
func TestPlanMemory(t *testing.T) {
	const pages = 256 // 1 MiB
	for seed := range uint64(40) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		want := make([]byte, pages*linux.PageSize)
		var chain []engine.State
		for depth := range 1 + rnd.IntN(5) {
			chain = append(chain, randomState(t, rnd, chain, want, depth == 0))
		}
		d := &Driver{images: memimage.NewImages(0)}
		p, err := d.planMemory(t.Context(), chain, 1, vmmwire.MaxFiles)
		if err != nil {
			t.Fatal(err)
		}
		if got := follow(t, p, pages); !bytes.Equal(got, want) {
			t.Errorf("seed %d: memory differs; plan: %+v", seed, p.memory)
		}
		p.close()
		d.images.Close()
	}
}

// TestPlanMemoryOfManyPieces: a chain in more pieces than a message holds is merged.
func TestPlanMemoryOfManyPieces(t *testing.T) {
	const memoryMiB = 64
	pages := uint64(memoryMiB << 20 / linux.PageSize)
	page := bytes.Repeat([]byte{1}, linux.PageSize)
	var chain []engine.State
	for i := range 2 {
		dir := t.TempDir()
		parent := ""
		if i > 0 {
			parent = chain[0].ID
		}
		chain = append(chain, writeState(t, dir, pages, parent, func(w *layerfmt.Writer) error {
			for u := uint64(0); u < pages; u += 3 {
				page[0] = byte(i)
				if err := w.Put(u, page); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	d := &Driver{images: memimage.NewImages(0)}
	defer d.images.Close()
	p, err := d.planMemory(t.Context(), chain, memoryMiB, vmmwire.MaxFiles)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if len(p.memory.Ranges) > vmmwire.MaxRanges || len(p.files) != 1 || p.base != chain[1].ID {
		t.Errorf("%d ranges of %d files over %s", len(p.memory.Ranges), len(p.files), p.base)
	}
	if got := follow(t, p, pages); got[0] != 1 || got[linux.PageSize] != 0 || got[3*linux.PageSize+1] != 1 {
		t.Error("memory differs")
	}
}

func randomState(t *testing.T, rnd *rand.Rand, chain []engine.State, want []byte, root bool) engine.State {
	parent := ""
	if len(chain) > 0 {
		parent = chain[len(chain)-1].ID
	}
	pages := uint64(len(want) / linux.PageSize)
	return writeState(t, t.TempDir(), pages, parent, func(w *layerfmt.Writer) error {
		for u := uint64(0); u < pages; {
			n := min(1+rnd.Uint64N(20), pages-u)
			b := want[u*linux.PageSize : (u+n)*linux.PageSize]
			switch rnd.IntN(4) {
			case 0: // data
				for i := range b {
					b[i] = byte(rnd.Uint32())
				}
				if err := w.Put(u, b); err != nil {
					return err
				}
			case 1: // zero
				if !root {
					clear(b)
					if err := w.Put(u, b); err != nil {
						return err
					}
				}
			}
			u += n
		}
		return nil
	})
}

func writeState(t *testing.T, dir string, pages uint64, parent string, fill func(*layerfmt.Writer) error) engine.State {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, memoryArtifact))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w, err := layerfmt.NewWriter(f, layerfmt.Header{Units: pages, Parent: parent})
	if err == nil {
		err = fill(w)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return engine.State{ID: ident.New(ident.Snapshot), Dir: dir, Artifacts: []engine.Artifact{{Name: memoryArtifact, Kind: kindMemory, Format: formatLayer}}}
}

// follow builds memory as the monitor does.
func follow(t *testing.T, p memoryPlan, pages uint64) []byte {
	t.Helper()
	out := make([]byte, pages*linux.PageSize)
	end := uint64(0)
	for _, r := range p.memory.Ranges {
		if r.Page < end {
			t.Fatalf("range %+v begins before %d", r, end)
		}
		end = r.Page + r.Count
		if r.File == vmmwire.NoFile {
			continue
		}
		if _, err := p.files[r.File].ReadAt(out[r.Page*linux.PageSize:end*linux.PageSize], int64(r.Offset)); err != nil {
			t.Fatal(err)
		}
	}
	if end > pages || slices.Contains(p.files, nil) {
		t.Fatalf("plan ends at %d", end)
	}
	return out
}
