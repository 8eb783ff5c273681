package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
)

// memoryName is the name of all our memory files; it marks the guest's RAM in
// /proc/PID/maps.
const memoryName = "forkd-memory"

// residents holds the resident images in use: one sealed memory file for each
// snapshot, with all layers of its chain merged. They are built on first use and
// dropped by Forget; a machine that still maps one keeps its pages alive. Beyond a
// limit those go that no machine maps, the one used longest ago first.
type residents struct {
	maxBytes int64 // 0: no limit

	mu sync.Mutex
	// +checklocks:mu
	images map[string]*resident
	// +checklocks:mu
	uses uint64 // counts, for the order of use
}

// resident is the image of one snapshot. Its mutex is held while it is built.
type resident struct {
	pins int    // calls that use file now; guarded by residents.mu
	used uint64 // residents.uses at its last use; guarded by residents.mu

	mu sync.Mutex
	// +checklocks:mu
	file *os.File
	// +checklocks:mu
	dropped bool
	bytes   atomic.Int64 // it occupies, once it is built
}

// pin returns the place of a snapshot's image and keeps it until unpin.
func (r *residents) pin(id string) *resident {
	r.mu.Lock()
	defer r.mu.Unlock()
	img := r.images[id]
	if img == nil {
		img = &resident{}
		r.images[id] = img
	}
	r.pinLocked(img)
	return img
}

func (r *residents) pinLocked(img *resident) {
	r.uses++
	img.pins++
	img.used = r.uses
}

func (r *residents) unpin(img *resident) {
	r.mu.Lock()
	defer r.mu.Unlock()
	img.pins--
}

// get returns the resident image of the last state of chain, which the residents own
// and keep at least until release.
func (r *residents) get(ctx context.Context, chain []engine.State, memoryMiB int) (_ *os.File, release func(), err error) {
	id := chain[len(chain)-1].ID
	for {
		img := r.pin(id)
		f, dropped, err := img.build(ctx, chain, memoryMiB)
		if err != nil || dropped {
			r.unpin(img)
		}
		if err != nil {
			return nil, nil, err
		}
		if !dropped {
			return f, func() { r.unpin(img) }, nil
		}
	}
}

func (i *resident) build(ctx context.Context, chain []engine.State, memoryMiB int) (_ *os.File, dropped bool, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.dropped {
		return nil, true, nil
	}
	if i.file == nil {
		i.file, err = buildResident(ctx, chain, memoryMiB)
		i.measureLocked()
	}
	return i.file, false, err
}

// peek returns the resident image of a snapshot if it is built, else nil. It is kept
// until release, which is never nil.
func (r *residents) peek(id string) (_ *os.File, release func()) {
	r.mu.Lock()
	img := r.images[id]
	if img != nil {
		r.pinLocked(img)
	}
	r.mu.Unlock()
	if img == nil {
		return nil, func() {}
	}
	release = func() { r.unpin(img) }
	if !img.mu.TryLock() { // being built: its layers are as good
		return nil, release
	}
	defer img.mu.Unlock()
	return img.file, release
}

// put registers an image found in a living machine, unless there is one already.
func (r *residents) put(id string, f *os.File) {
	img := r.pin(id)
	defer r.unpin(img)
	img.mu.Lock()
	defer img.mu.Unlock()
	if img.file != nil || img.dropped {
		_ = f.Close()
		return
	}
	img.file = f
	img.measureLocked()
}

func (r *residents) forget(id string) {
	r.mu.Lock()
	img := r.images[id]
	delete(r.images, id)
	r.mu.Unlock()
	if img != nil {
		img.drop()
	}
}

// drop closes the image; who waits for it builds another.
func (i *resident) drop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.dropped = true
	if i.file != nil {
		_ = i.file.Close()
		i.file = nil
	}
}

func (r *residents) close() {
	r.mu.Lock()
	ids := make([]string, 0, len(r.images))
	for id := range r.images {
		ids = append(ids, id)
	}
	r.mu.Unlock()
	for _, id := range ids {
		r.forget(id)
	}
}

// emptyMemory returns a sealed memory file of zeros, for a boot.
func emptyMemory(memoryMiB int) (*os.File, error) {
	f, err := linux.MemFile(memoryName, int64(memoryMiB)<<20)
	if err != nil {
		return nil, err
	}
	if err := linux.SealImmutable(f); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// buildResident merges the memory layers of chain into one sealed memory file.
func buildResident(ctx context.Context, chain []engine.State, memoryMiB int) (*os.File, error) {
	layers, err := openLayers(chain, int64(memoryMiB)<<20)
	if err != nil {
		return nil, err
	}
	defer layers.close()
	f, err := linux.MemFile(memoryName, int64(memoryMiB)<<20)
	if err != nil {
		return nil, err
	}
	if err := fillResident(ctx, f, layers); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("build memory image of %s: %w", chain[len(chain)-1].ID, err)
	}
	if err := linux.SealImmutable(f); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// openLayers opens the memory layer of each state of chain. memoryBytes is the size
// they must be for; 0 takes any.
func openLayers(chain []engine.State, memoryBytes int64) (layerChain, error) {
	var layers layerChain
	for _, s := range chain {
		if err := layers.open(s, memoryBytes); err != nil {
			layers.close()
			return layerChain{}, fmt.Errorf("open memory layer of %s: %w", s.ID, err)
		}
	}
	return layers, nil
}

// layerChain is an open chain of memory layers.
type layerChain struct {
	files   []*os.File
	readers []*layerfmt.Reader
}

func (c *layerChain) open(s engine.State, memoryBytes int64) error {
	f, err := openArtifact(s, kindMemory)
	if err != nil {
		return err
	}
	c.files = append(c.files, f)
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
	c.readers = append(c.readers, r)
	return nil
}

func (c *layerChain) close() {
	for _, f := range c.files {
		_ = f.Close()
	}
}

// openArtifact opens the only artifact of a kind in s. A missing file is damage.
func openArtifact(s engine.State, kind string) (*os.File, error) {
	files, err := openArtifacts(s, kind)
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

// openArtifacts opens all artifacts of a kind in s, in their order. The caller
// closes the files returned, also on error.
func openArtifacts(s engine.State, kind string) ([]*os.File, error) {
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

// fillResident copies what the layers hold into f; zeros stay holes.
func fillResident(ctx context.Context, f *os.File, layers layerChain) error {
	ranges, err := layerfmt.Plan(layers.readers)
	if err != nil {
		return err
	}
	unit := int64(layers.readers[0].Header().UnitSize)
	buf := make([]byte, 1<<20)
	for _, r := range ranges {
		if r.Layer == layerfmt.ZeroLayer {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		for done := int64(0); done < int64(r.Count)*unit; {
			n := min(int64(len(buf)), int64(r.Count)*unit-done)
			if _, err := layers.files[r.Layer].ReadAt(buf[:n], r.Offset+done); err != nil {
				return fmt.Errorf("read layer %d at %d: %w", r.Layer, r.Offset+done, err)
			}
			if _, err := f.WriteAt(buf[:n], int64(r.Unit)*unit+done); err != nil {
				return err
			}
			done += n
		}
	}
	return nil
}
