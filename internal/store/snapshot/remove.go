package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// maxNamed bounds how many dependents or holders a message names.
const maxNamed = 10

// Remove deletes a snapshot. ErrConflict: it has dependents or is leased. When it
// returns nil the snapshot is gone for good and its space is free.
func (s *Store) Remove(ctx context.Context, id string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("remove snapshot %s: %w", id, err)
	}
	if err := s.beginRemove(id); err != nil {
		return fmt.Errorf("remove snapshot %s: %w", id, err)
	}
	trash, err := s.trash(id)
	s.endRemove(id, err == nil)
	if err != nil {
		return fmt.Errorf("remove snapshot %s: %w", id, err)
	}
	if err := os.RemoveAll(trash); err != nil {
		return errdefs.WithHint(fmt.Errorf("free the space of removed snapshot %s: %w", id, classify(err)), "the next start of the daemon tries again")
	}
	return s.step(StepDelete, trash)
}

// beginRemove decides under the lock and reserves the id.
func (s *Store) beginRemove(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if what, ok := s.busy[id]; ok {
		return errdefs.New(errdefs.ErrConflict, "it is %s", what)
	}
	_, ready := s.ready[id]
	_, isBroken := s.broken[id]
	if !ready && !isBroken {
		return errdefs.New(errdefs.ErrNotFound, "it does not exist")
	}
	if holders := s.holdersLocked(id); len(holders) > 0 {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "it is in use by %d sandboxes: %s", len(holders), few(holders)),
			"end them first")
	}
	if deps := s.childrenLocked()[id]; len(deps) > 0 {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "%d snapshots depend on it: %s", len(deps), few(deps)),
			"remove them first, or use --cascade")
	}
	s.busy[id] = "being removed"
	return nil
}

func (s *Store) endRemove(id string, gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.busy, id)
	if gone {
		delete(s.ready, id)
		delete(s.broken, id)
	}
}

// trash renames the snapshot away, durably, before anything in it is deleted.
func (s *Store) trash(id string) (string, error) {
	final, trash := s.Dir(id), filepath.Join(s.dir, trashPrefix+id)
	// Ids are never reused, so this could only be the rest of a failed removal.
	if err := os.RemoveAll(trash); err != nil {
		return "", classify(err)
	}
	if err := os.Rename(final, trash); err != nil {
		return "", classify(err)
	}
	if err := s.step(StepTrash, trash); err != nil {
		return "", err
	}
	if err := syncDir(s.dir); err != nil {
		return "", errors.Join(classify(err), os.Rename(trash, final))
	}
	return trash, s.step(StepSyncTrash, s.dir)
}

// few joins names, but not too many.
func few(names []string) string {
	if len(names) > maxNamed {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNamed], ", "), len(names)-maxNamed)
	}
	return strings.Join(names, ", ")
}
