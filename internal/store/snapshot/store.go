package snapshot

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// Step is a durable step: after it, a crash may find its effect on disk.
type Step string

// The durable steps in the order in which Publish and Remove take them.
const (
	StepSealArtifact  Step = "seal-artifact" // mode set, digest known, synced
	StepWriteManifest Step = "write-manifest"
	StepSyncManifest  Step = "sync-manifest"
	StepSyncStaging   Step = "sync-staging"
	StepPublish       Step = "publish" // renamed to its id
	StepSyncPublish   Step = "sync-publish"
	StepTrash         Step = "trash" // renamed away from its id
	StepSyncTrash     Step = "sync-trash"
	StepDelete        Step = "delete" // trash is gone
)

// Config says where and how snapshots are stored.
type Config struct {
	Dir string // created with mode 0700 if missing
	// FileMode of artifacts: 0400 (also if 0), 0440 or 0444. Directories can be
	// searched by those who can read the files.
	FileMode fs.FileMode
	// Failpoint, if set, is called after each durable step with the path it made
	// durable. An error stops the operation there, with no cleaning up: as a crash.
	Failpoint func(step Step, path string) error
}

const (
	stagingPrefix = ".staging-"
	trashPrefix   = ".trash-"
)

// Store is an open snapshot directory. All methods may be called concurrently.
type Store struct {
	dir       string
	fileMode  fs.FileMode
	dirMode   fs.FileMode
	failpoint func(Step, string) error

	mu sync.Mutex
	// +checklocks:mu
	ready map[string]Manifest
	// +checklocks:mu
	broken map[string]broken
	// busy holds the ids that are being made or removed, with what happens to them.
	// +checklocks:mu
	busy map[string]string
	// +checklocks:mu
	leases map[string]map[string]int
}

// broken is a snapshot that is there but cannot be used.
type broken struct {
	parent string
	err    error
}

// Open deletes what a crash left and reads all manifests.
func Open(c Config) (*Store, error) {
	s := &Store{
		dir:       c.Dir,
		fileMode:  cmp.Or(c.FileMode, 0o400),
		failpoint: c.Failpoint,
		ready:     map[string]Manifest{},
		broken:    map[string]broken{},
		busy:      map[string]string{},
		leases:    map[string]map[string]int{},
	}
	if c.Dir == "" || (s.fileMode != 0o400 && s.fileMode != 0o440 && s.fileMode != 0o444) {
		return nil, errdefs.New(errdefs.ErrInvalid, "open snapshot store: directory %q, file mode %04o", c.Dir, s.fileMode)
	}
	s.dirMode = 0o700 | (s.fileMode&0o044)>>2 // whoever reads may search
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create snapshot store: %w", classify(err))
	}
	entries, err := os.ReadDir(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("open snapshot store: %w", classify(err))
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasPrefix(name, stagingPrefix), strings.HasPrefix(name, trashPrefix):
			if err := os.RemoveAll(filepath.Join(c.Dir, name)); err != nil {
				return nil, fmt.Errorf("clean snapshot store: %w", classify(err))
			}
		case e.IsDir() && isSnapshotID(name):
			s.load(name)
		}
	}
	return s, nil
}

// load reads one snapshot. It runs in Open, before s is shared.
//
// +checklocksignore
func (s *Store) load(id string) {
	b, err := s.readManifest(id)
	if err == nil {
		var m Manifest
		if m, err = s.decode(id, b); err == nil {
			s.ready[id] = m
			return
		}
	}
	s.broken[id] = broken{parent: parentOf(b), err: fmt.Errorf("read snapshot %s: %w", id, err)}
}

// decode reads the manifest of id and looks whether all files are there.
func (s *Store) decode(id string, b []byte) (Manifest, error) {
	m, err := decodeManifest(b)
	if err != nil {
		return m, err
	}
	if m.ID != id {
		return m, errdefs.New(errdefs.ErrCorrupt, "its manifest is that of %s", m.ID)
	}
	for _, a := range m.Artifacts {
		info, err := os.Lstat(filepath.Join(s.Dir(id), a.Name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return m, errdefs.New(errdefs.ErrCorrupt, "artifact %s is missing", a.Name)
		case err != nil:
			return m, classify(err)
		case !info.Mode().IsRegular() || info.Size() != a.Size:
			return m, errdefs.New(errdefs.ErrCorrupt, "artifact %s is %s with %d bytes, not a file with %d", a.Name, info.Mode(), info.Size(), a.Size)
		}
	}
	return m, nil
}

func (s *Store) readManifest(id string) ([]byte, error) {
	f, err := openRegular(filepath.Join(s.Dir(id), ManifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.ErrCorrupt, "its manifest is missing")
	}
	if err != nil {
		return nil, classify(err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, MaxManifestBytes+1))
	return b, classify(err)
}

// openRegular opens a regular file for reading; it follows no link and does not
// wait for the other side of a pipe.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errdefs.New(errdefs.ErrCorrupt, "%s is not a regular file", filepath.Base(path))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Dir is where the files of a snapshot lie. Callers only read there.
func (s *Store) Dir(id string) string { return filepath.Join(s.dir, id) }

// Get returns the manifest of a snapshot.
func (s *Store) Get(id string) (Manifest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, err := s.getLocked(id)
	return m.clone(), err
}

func (s *Store) getLocked(id string) (Manifest, error) {
	if m, ok := s.ready[id]; ok {
		return m, nil
	}
	if b, ok := s.broken[id]; ok {
		return Manifest{}, b.err
	}
	return Manifest{}, errdefs.New(errdefs.ErrNotFound, "snapshot %.80s does not exist", id)
}

// List returns all snapshots that can be used, oldest first.
func (s *Store) List() []Manifest {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Manifest, 0, len(s.ready))
	for _, m := range s.ready {
		out = append(out, m.clone())
	}
	slices.SortFunc(out, func(a, b Manifest) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return out
}

// Broken returns why each snapshot that cannot be used cannot, mostly ErrCorrupt or
// ErrIncompatible. They can be removed.
func (s *Store) Broken() map[string]error {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[string]error, len(s.broken))
	for id, b := range s.broken {
		out[id] = b.err
	}
	return out
}

func (s *Store) step(step Step, path string) error {
	if s.failpoint == nil {
		return nil
	}
	return s.failpoint(step, path)
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// classify gives an error of the operating system its class.
func classify(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errdefs.WithHint(errdefs.As(errdefs.ErrResourceExhausted, err), "free disk space: remove snapshots that are not needed")
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return errdefs.As(errdefs.ErrPermission, err)
	case errors.Is(err, unix.ELOOP):
		return errdefs.As(errdefs.ErrCorrupt, err)
	}
	return err
}
