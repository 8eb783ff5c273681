package memimage

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
)

// KindMemory is the kind of the artifact that holds a memory layer.
const KindMemory = "memory"

// OpenLayers opens the memory layer of each state of chain. memoryBytes is the size
// they must be for; 0 takes any.
func OpenLayers(chain []engine.State, memoryBytes int64) (Layers, error) {
	var layers Layers
	for _, s := range chain {
		if err := layers.open(s, memoryBytes); err != nil {
			layers.Close()
			return Layers{}, fmt.Errorf("open memory layer of %s: %w", s.ID, err)
		}
	}
	return layers, nil
}

// Layers is an open chain of memory layers.
type Layers struct {
	Files   []*os.File
	Readers []*layerfmt.Reader
}

func (c *Layers) open(s engine.State, memoryBytes int64) error {
	f, err := OpenArtifact(s, KindMemory)
	if err != nil {
		return err
	}
	c.Files = append(c.Files, f)
	st, err := f.Stat()
	if err != nil {
		return err
	}
	r, err := layerfmt.Open(f, st.Size())
	if err != nil {
		return err
	}
	if got := r.Header().LogicalBytes(); memoryBytes != 0 && got != memoryBytes {
		return errdefs.New(errdefs.ErrCorrupt, "it is for %d bytes, the machine has %d", got, memoryBytes)
	}
	c.Readers = append(c.Readers, r)
	return nil
}

// Close closes the files.
func (c *Layers) Close() {
	for _, f := range c.Files {
		_ = f.Close()
	}
}

// OpenArtifact opens the only artifact of a kind in s. A missing file is damage.
func OpenArtifact(s engine.State, kind string) (*os.File, error) {
	files, err := OpenArtifacts(s, kind)
	if err == nil && len(files) != 1 {
		err = errdefs.New(errdefs.ErrCorrupt, "snapshot %s has %d %s artifacts", s.ID, len(files), kind)
	}
	if err != nil {
		for _, f := range files {
			_ = f.Close()
		}
		return nil, err
	}
	return files[0], nil
}

// OpenArtifacts opens all artifacts of a kind in s, in their order. The caller
// closes the files returned, also on error.
func OpenArtifacts(s engine.State, kind string) ([]*os.File, error) {
	var files []*os.File
	for _, a := range s.Artifacts {
		if a.Kind != kind {
			continue
		}
		f, err := os.Open(filepath.Join(s.Dir, a.Name))
		if errors.Is(err, fs.ErrNotExist) {
			err = errdefs.As(errdefs.ErrCorrupt, err)
		}
		if err != nil {
			return files, fmt.Errorf("open %s of snapshot %s: %w", kind, s.ID, err)
		}
		files = append(files, f)
	}
	if len(files) == 0 {
		return nil, errdefs.New(errdefs.ErrCorrupt, "snapshot %s has no %s artifact", s.ID, kind)
	}
	return files, nil
}

// RangeOf finds the range of a plan that holds unit u; plans have no gaps.
func RangeOf(ranges []layerfmt.Range, u uint64) layerfmt.Range {
	i := sort.Search(len(ranges), func(i int) bool { return ranges[i].Unit+ranges[i].Count > u })
	return ranges[i]
}
