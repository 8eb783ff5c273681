package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// Config says where a Store keeps things. The directories are made if missing.
type Config struct {
	Dir          string // one directory per image
	CacheDir     string // downloads; may be emptied at any time
	KernelDir    string
	InitramfsDir string
	Agent        []byte                           // the static forkd-agent program
	Trees        bool                             // roots have a tree, too
	Log          func(format string, args ...any) // may be nil
	Now          func() time.Time                 // nil means time.Now
}

// Image is a built root file system. Name is empty once the name was given to
// another image.
type Image struct {
	ID            string
	Name          string
	Source        string // e.g. "debian:bookworm"
	Suite         string
	Packages      []string // as asked for, sorted
	DiskMiB       int
	Bytes         int64  // physical size of the disk
	Digest        string // of the disk's content, see [DigestDisk]
	KernelDigest  string
	KernelRelease string
	CreatedAt     time.Time
	Builtin       bool
}

// Progress is told the step a long call is in and how much of the whole is done,
// from 0 to 1. Calls come from one goroutine at a time.
type Progress = func(step string, fraction float64)

// Store builds and keeps images. Its methods may be called concurrently; builds
// run one after another.
type Store struct {
	cfg         Config
	agentDigest string

	building, kernelWork, initramfsWork, treeWork slot

	mu       sync.Mutex
	images   map[string]Image  // +checklocks:mu
	broken   map[string]error  // +checklocks:mu
	names    map[string]string // +checklocks:mu
	reserved map[string]bool   // +checklocks:mu names being built
	kernels  map[string]Kernel // +checklocks:mu by digest, as read or fetched before
}

// New opens the store, removes what a crash left half-made and reads the
// manifests. A damaged image does not fail it: [Store.Get] reports that one.
func New(cfg Config) (*Store, error) {
	if len(cfg.Agent) == 0 {
		return nil, errdefs.New(errdefs.ErrInvalid, "open image store: no agent program was given")
	}
	if cfg.Log == nil {
		cfg.Log = func(string, ...any) {}
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	sum := sha256.Sum256(cfg.Agent)
	s := &Store{
		cfg: cfg, agentDigest: hex.EncodeToString(sum[:]),
		building: newSlot(), kernelWork: newSlot(), initramfsWork: newSlot(), treeWork: newSlot(),
		images: map[string]Image{}, broken: map[string]error{}, names: map[string]string{}, reserved: map[string]bool{}, kernels: map[string]Kernel{},
	}
	for _, dir := range []string{cfg.Dir, cfg.CacheDir, cfg.KernelDir, cfg.InitramfsDir} {
		if dir == "" || !filepath.IsAbs(dir) {
			return nil, errdefs.New(errdefs.ErrInvalid, "open image store: directory %q is not absolute", dir)
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, classify(fmt.Errorf("open image store: %w", err))
		}
		if err := removeTemps(dir); err != nil {
			return nil, fmt.Errorf("open image store: %w", err)
		}
	}
	if err := s.load(); err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	return s, nil
}

// load reads all manifests and the names, and finishes publications that a crash
// cut off between image and name.
func (s *Store) load() error {
	entries, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range entries {
		id := e.Name()
		if ident.KindOf(id) != ident.Image {
			continue
		}
		img, err := readImage(s.imageDir(id))
		if err == nil && img.ID != id {
			err = errdefs.New(errdefs.ErrCorrupt, "manifest is of image %s", img.ID)
		}
		if err != nil {
			s.broken[id] = fmt.Errorf("read image %s: %w", id, err)
			s.cfg.Log("image %s is left out: %v", id, err)
			continue
		}
		s.images[id] = img
	}
	names, err := readNames(s.namesFile())
	if err != nil {
		return err
	}
	s.names = names
	return s.finishNamesLocked()
}

// List returns all images, newest first.
func (s *Store) List() ([]Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Image, 0, len(s.images))
	for _, img := range s.images {
		out = append(out, s.viewLocked(img))
	}
	slices.SortFunc(out, func(a, b Image) int {
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return out, nil
}

// Get finds an image by id, name or unique id prefix.
func (s *Store) Get(ref string) (Image, error) {
	if err := ident.CheckRef(ref); err != nil {
		return Image{}, fmt.Errorf("find image: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if img, ok := s.images[ref]; ok {
		return s.viewLocked(img), nil
	}
	if err := s.broken[ref]; err != nil {
		return Image{}, err
	}
	if id, ok := s.names[ref]; ok {
		if err := s.broken[id]; err != nil {
			return Image{}, fmt.Errorf("find image %s: %w", ref, err)
		}
		return s.viewLocked(s.images[id]), nil
	}
	return s.byPrefixLocked(ref)
}

func (s *Store) byPrefixLocked(ref string) (Image, error) {
	var found []string
	for id := range s.images {
		if strings.HasPrefix(id, ref) {
			found = append(found, id)
		}
	}
	switch len(found) {
	case 0:
		return Image{}, errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "image %q: not found", ref), "forkd image ls shows what exists")
	case 1:
		return s.viewLocked(s.images[found[0]]), nil
	}
	slices.Sort(found)
	const shown = 8
	list := strings.Join(found[:min(len(found), shown)], ", ")
	if len(found) > shown {
		list += fmt.Sprintf(" and %d more", len(found)-shown)
	}
	return Image{}, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "image %q: matches %d images: %s", ref, len(found), list), "give more characters of the id")
}

// viewLocked is img with the name it has now, and a slice of its own.
func (s *Store) viewLocked(img Image) Image {
	if s.names[img.Name] != img.ID {
		img.Name = ""
	}
	img.Packages = slices.Clone(img.Packages)
	return img
}

// Remove deletes an image and frees its name. The caller has made sure that
// nothing uses it. It may be repeated after an error; an unknown id is ErrNotFound.
func (s *Store) Remove(ctx context.Context, id string) error {
	if err := s.building.acquire(ctx); err != nil {
		return fmt.Errorf("remove image %.40s: %w", id, err)
	}
	defer s.building.release()
	if !s.known(id) {
		return errdefs.New(errdefs.ErrNotFound, "image %.80q: not found", id)
	}
	if err := s.dropName(id); err != nil {
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	if err := s.discard(id); err != nil {
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.images, id)
	delete(s.broken, id)
	return nil
}

// discard deletes the directory of an image: first as a whole, so that a crash
// leaves either all of it or what New removes.
func (s *Store) discard(id string) error {
	trash := filepath.Join(s.cfg.Dir, tempPrefix+"gone-"+id)
	if err := publish(s.imageDir(id), trash); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(trash)
}

func (s *Store) known(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.images[id]
	return ok || s.broken[id] != nil
}

func (s *Store) imageDir(id string) string { return filepath.Join(s.cfg.Dir, id) }
