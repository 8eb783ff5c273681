package memimage

import (
	"cmp"
	"context"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"forkd.dev/forkd/internal/engine"
)

// FileName is the name of all our memory files; it marks the guest's RAM in
// /proc/PID/maps.
const FileName = "forkd-memory"

// Images holds the resident images in use: one sealed memory file for each snapshot,
// with all layers of its chain merged. They are built on first use and dropped by
// Forget; a machine that still maps one keeps its pages alive. Beyond a limit those go
// that no machine maps, the one used longest ago first. Methods may be called
// concurrently.
type Images struct {
	maxBytes int64 // 0: no limit

	mu sync.Mutex
	// +checklocks:mu
	images map[string]*image
	// +checklocks:mu
	uses uint64 // counts, for the order of use
}

// image is the image of one snapshot. Its mutex is held while it is built.
type image struct {
	pins int    // calls that use file now; guarded by Images.mu
	used uint64 // Images.uses at its last use; guarded by Images.mu

	mu sync.Mutex
	// +checklocks:mu
	file *os.File
	// +checklocks:mu
	dropped bool
	bytes   atomic.Int64 // it occupies, once it is built
}

// NewImages returns an empty set. maxBytes bounds the images that no machine maps; 0
// means no bound.
func NewImages(maxBytes int64) *Images {
	return &Images{images: map[string]*image{}, maxBytes: maxBytes}
}

// pin returns the place of a snapshot's image and keeps it until unpin.
func (r *Images) pin(id string) *image {
	r.mu.Lock()
	defer r.mu.Unlock()
	img := r.images[id]
	if img == nil {
		img = &image{}
		r.images[id] = img
	}
	r.pinLocked(img)
	return img
}

func (r *Images) pinLocked(img *image) {
	r.uses++
	img.pins++
	img.used = r.uses
}

func (r *Images) unpin(img *image) {
	r.mu.Lock()
	defer r.mu.Unlock()
	img.pins--
}

// Get returns the resident image of the last state of chain, which the Images own
// and keep at least until release.
func (r *Images) Get(ctx context.Context, chain []engine.State, memoryMiB int) (_ *os.File, release func(), err error) {
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

func (i *image) build(ctx context.Context, chain []engine.State, memoryMiB int) (_ *os.File, dropped bool, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.dropped {
		return nil, true, nil
	}
	if i.file == nil {
		i.file, err = buildImage(ctx, chain, memoryMiB)
		i.measureLocked()
	}
	return i.file, false, err
}

// Peek returns the resident image of a snapshot if it is built, else nil. It is kept
// until release, which is never nil.
func (r *Images) Peek(id string) (_ *os.File, release func()) {
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

// Put registers an image found in a living machine, unless there is one already.
func (r *Images) Put(id string, f *os.File) {
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

// Forget drops the image of a snapshot.
func (r *Images) Forget(id string) {
	r.mu.Lock()
	img := r.images[id]
	delete(r.images, id)
	r.mu.Unlock()
	if img != nil {
		img.drop()
	}
}

// drop closes the image; who waits for it builds another.
func (i *image) drop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.dropped = true
	if i.file != nil {
		_ = i.file.Close()
		i.file = nil
	}
}

// Close drops all images.
func (r *Images) Close() {
	r.mu.Lock()
	ids := make([]string, 0, len(r.images))
	for id := range r.images {
		ids = append(ids, id)
	}
	r.mu.Unlock()
	for _, id := range ids {
		r.Forget(id)
	}
}

// OccupiedKiB sums the pages of the images that are finished.
func (r *Images) OccupiedKiB() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	var bytes int64
	for _, img := range r.images {
		bytes += img.bytes.Load()
	}
	return bytes / 1024
}

// measureLocked notes what the finished image occupies; a hole occupies nothing.
func (i *image) measureLocked() {
	if i.file == nil {
		return
	}
	if st, err := i.file.Stat(); err == nil {
		i.bytes.Store(st.Sys().(*syscall.Stat_t).Blocks * 512)
	}
}

// List lists the images, the largest first; mapped says how many machines map each.
func (r *Images) List(mapped map[string]int) []engine.Resident {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]engine.Resident, 0, len(r.images))
	for id, img := range r.images {
		if bytes := img.bytes.Load(); bytes > 0 {
			out = append(out, engine.Resident{SnapshotID: id, Bytes: bytes, Machines: mapped[id]})
		}
	}
	slices.SortFunc(out, func(a, b engine.Resident) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.SnapshotID, b.SnapshotID))
	})
	return out
}

// Has tells whether there is an image of a snapshot, or one is being built.
func (r *Images) Has(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.images[id] != nil
}

// Trim closes the images beyond the limit that no machine maps, as mapped, which is
// asked for only then, says. Closing a mapped one would free nothing, and the next fork
// would make a second.
func (r *Images) Trim(mapped func() map[string]int) {
	if r.maxBytes == 0 {
		return
	}
	for _, img := range r.surplus(mapped()) {
		img.drop()
	}
}

// surplus takes the images out that are to go.
func (r *Images) surplus(mapped map[string]int) []*image {
	r.mu.Lock()
	defer r.mu.Unlock()
	var total int64
	var idle []string
	for id, img := range r.images {
		bytes := img.bytes.Load()
		total += bytes
		if bytes > 0 && img.pins == 0 && mapped[id] == 0 {
			idle = append(idle, id)
		}
	}
	slices.SortFunc(idle, func(a, b string) int { return cmp.Compare(r.images[a].used, r.images[b].used) })
	var out []*image
	for _, id := range idle {
		if total <= r.maxBytes {
			break
		}
		total -= r.images[id].bytes.Load()
		out = append(out, r.images[id])
		delete(r.images, id)
	}
	return out
}
