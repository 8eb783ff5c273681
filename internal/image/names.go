package image

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

const (
	namesFormat = 1
	// unnamedFile marks a published image whose name is still to be given.
	unnamedFile = "unnamed"
)

func (s *Store) namesFile() string { return filepath.Join(s.cfg.Dir, "names.json") }

func readNames(path string) (map[string]string, error) {
	names := map[string]string{}
	err := readSealed(path, namesFormat, &names)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]string{}, nil
	}
	if err != nil {
		return nil, err
	}
	for name, id := range names {
		if ident.CheckTag(name) != nil || ident.KindOf(id) != ident.Image {
			return nil, errdefs.New(errdefs.ErrCorrupt, "read %s: entry %.80q: %.80q", path, name, id)
		}
	}
	return names, nil
}

// reserve claims a name for a build until unreserve. What is taken is a conflict
// unless the build replaces; a second build of one name at a time always is.
func (s *Store) reserve(spec BuildSpec) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reserved[spec.Name] {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "image %q is being built", spec.Name), "wait until that build has ended")
	}
	if id, taken := s.names[spec.Name]; taken && !spec.Replace {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "image name %q is taken by %s", spec.Name, id), "choose another name, or move it with --replace")
	}
	s.reserved[spec.Name] = true
	return nil
}

func (s *Store) unreserve(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.reserved, name)
}

// giveName moves the name of a published image to it. The caller has the build slot.
func (s *Store) giveName(img Image) error {
	err := s.changeNames(func(names map[string]string) { names[img.Name] = img.ID })
	if err != nil {
		return err
	}
	return ignoreMissing(os.Remove(filepath.Join(s.imageDir(img.ID), unnamedFile)))
}

// dropName frees the name of image id, if it has one. The caller has the build slot.
func (s *Store) dropName(id string) error {
	return s.changeNames(func(names map[string]string) {
		maps.DeleteFunc(names, func(_, owner string) bool { return owner == id })
	})
}

// changeNames stores the changed names, then makes them visible. The build slot
// keeps other writers out.
func (s *Store) changeNames(change func(map[string]string)) error {
	s.mu.Lock()
	names := maps.Clone(s.names)
	s.mu.Unlock()
	change(names)
	if err := s.storeNames(names); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names = names
	return nil
}

func (s *Store) storeNames(names map[string]string) error {
	data, err := seal(namesFormat, names)
	if err != nil {
		return fmt.Errorf("store image names: %w", err)
	}
	if err := replaceFile(s.namesFile(), data, 0o644); err != nil {
		return fmt.Errorf("store image names: %w", err)
	}
	return nil
}

// finishNamesLocked gives marked images their names and forgets names of images
// that are gone. It runs while the store is opened, when nobody else has it.
func (s *Store) finishNamesLocked() error {
	before := maps.Clone(s.names)
	var marks []string
	for id, img := range s.images {
		mark := filepath.Join(s.imageDir(id), unnamedFile)
		if _, err := os.Lstat(mark); err != nil {
			continue
		}
		marks = append(marks, mark)
		// Of several the newest wins, as it would have without the crash.
		if other, ok := s.images[s.names[img.Name]]; !ok || !other.CreatedAt.After(img.CreatedAt) {
			s.names[img.Name] = id
		}
	}
	maps.DeleteFunc(s.names, func(_, id string) bool {
		_, ok := s.images[id]
		return !ok && s.broken[id] == nil
	})
	if !maps.Equal(before, s.names) {
		if err := s.storeNames(s.names); err != nil {
			return err
		}
	}
	for _, mark := range marks {
		if err := ignoreMissing(os.Remove(mark)); err != nil {
			return fmt.Errorf("finish image: %w", err)
		}
	}
	return nil
}
