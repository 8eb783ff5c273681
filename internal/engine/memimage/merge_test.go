package memimage

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/layerfmt"
)

// TestMerge: however random layers are merged with those below, the memory that the
// chain stands for is the same, and what stays is not copied.
func TestMerge(t *testing.T) {
	const units, depth = 200, 8
	r := rand.New(rand.NewPCG(1, 2))
	dir := t.TempDir()
	var chain []engine.State
	for i := range depth {
		parent := ""
		if i > 0 {
			parent = chain[i-1].ID
		}
		chain = append(chain, state(t, dir, ident.New(ident.Snapshot), func(path string) error {
			return randomLayer(path, parent, units, r)
		}))
	}
	want := content(t, chain)
	for keep := range depth {
		merged := state(t, dir, ident.New(ident.Snapshot), func(path string) error {
			return Merge(t.Context(), engine.Compaction{Chain: chain, Keep: keep, BytesPerSecond: 1 << 30}, path)
		})
		if got := content(t, append(chain[:keep:keep], merged)); got != want {
			t.Errorf("merged on top of %d layers the memory is another", keep)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Merge(ctx, engine.Compaction{Chain: chain}, filepath.Join(dir, "cancelled")); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled merge: %v", err)
	}
}

func state(t *testing.T, dir, id string, write func(path string) error) engine.State {
	t.Helper()
	s := engine.State{ID: id, Dir: filepath.Join(dir, id), Artifacts: []engine.Artifact{{Name: "memory.layer", Kind: KindMemory}}}
	if err := os.Mkdir(s.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := write(filepath.Join(s.Dir, "memory.layer")); err != nil {
		t.Fatal(err)
	}
	return s
}

// randomLayer writes data, zeros and gaps.
func randomLayer(path, parent string, units uint64, r *rand.Rand) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	w, err := layerfmt.NewWriter(f, layerfmt.Header{Units: units, Parent: parent})
	if err != nil {
		return err
	}
	page := make([]byte, layerfmt.DefaultUnitSize)
	for u := uint64(0); u < units; u++ {
		switch r.IntN(4) {
		case 0:
			page[0] = byte(1 + r.IntN(255))
			err = w.Data(u, page)
		case 1:
			err = w.Zero(u, 1)
		}
		if err != nil {
			return err
		}
	}
	return w.Close()
}

// content is the first byte of every page.
func content(t *testing.T, chain []engine.State) string {
	t.Helper()
	layers, err := OpenLayers(chain, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer layers.Close()
	ranges, err := layerfmt.Plan(layers.Readers)
	if err != nil {
		t.Fatal(err)
	}
	var out []byte
	for _, r := range ranges {
		for i := range r.Count {
			b := []byte{0}
			if r.Layer != layerfmt.ZeroLayer {
				if _, err := layers.Files[r.Layer].ReadAt(b, r.Offset+int64(i)*layerfmt.DefaultUnitSize); err != nil {
					t.Fatal(err)
				}
			}
			out = append(out, b[0])
		}
	}
	return string(out)
}
