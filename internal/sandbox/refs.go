package sandbox

import (
	"context"
	"errors"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// minPrefix is the shortest id prefix that counts as a reference: the kind and
// two characters.
const minPrefix = 4

// pick finds the one id in ids that ref means: itself or a unique prefix.
func pick(kind ident.Kind, what, ref string, ids []string) (string, error) {
	var found []string
	for _, id := range ids {
		if id == ref {
			return id, nil
		}
		if len(ref) >= minPrefix && strings.HasPrefix(ref, string(kind)) && strings.HasPrefix(id, ref) {
			found = append(found, id)
		}
	}
	switch len(found) {
	case 0:
		return "", errdefs.New(errdefs.ErrNotFound, "there is no %s %q", what, ref)
	case 1:
		return found[0], nil
	}
	slices.Sort(found)
	return "", errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "%s %q is ambiguous: %s", what, ref, strings.Join(found, ", ")),
		"give more characters of the id")
}

// resolve finds the sandbox that ref means: a name, an id or a unique id prefix.
func (s *Service) resolve(ref string) (*entry, error) {
	if err := ident.CheckRef(ref); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, ok := s.names[ref]; ok {
		return s.entries[id], nil
	}
	ids := make([]string, 0, len(s.entries))
	for id := range s.entries {
		ids = append(ids, id)
	}
	id, err := pick(ident.Sandbox, "sandbox", ref, ids)
	if err != nil {
		return nil, errdefs.WithHint(err, "list them with: forkd ls")
	}
	return s.entries[id], nil
}

// Sandboxes lists the living sandboxes and those that failed, oldest first.
func (s *Service) Sandboxes(context.Context) ([]Sandbox, error) {
	s.mu.Lock()
	entries := make([]*entry, 0, len(s.entries))
	for _, e := range s.entries {
		entries = append(entries, e)
	}
	s.mu.Unlock()
	out := make([]Sandbox, 0, len(entries))
	for _, e := range entries {
		if info := e.snapshot(); info.State != Creating {
			out = append(out, info)
		}
	}
	slices.SortFunc(out, func(a, b Sandbox) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out, nil
}

// Sandbox returns one sandbox.
func (s *Service) Sandbox(_ context.Context, ref string) (Sandbox, error) {
	e, err := s.resolve(ref)
	if err != nil {
		return Sandbox{}, err
	}
	return e.snapshot(), nil
}

// Kill ends a sandbox and forgets it. It works in any state.
func (s *Service) Kill(ctx context.Context, ref string) error {
	for {
		e, err := s.resolve(ref)
		if err != nil {
			return err
		}
		err = s.end(ctx, e, "killed")
		if !errors.Is(err, errdefs.ErrConflict) || !e.rolledBack() {
			return err
		}
		// A rollback is putting another machine in its place: that one is meant.
		if err := e.settled(ctx); err != nil {
			return err
		}
	}
}
