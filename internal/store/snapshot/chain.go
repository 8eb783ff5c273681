package snapshot

import (
	"fmt"
	"slices"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// maxDepth bounds chains, against manifests that were tampered with.
const maxDepth = 10_000

// Chain returns a snapshot and its ancestors, root first. ErrCorrupt: an ancestor
// is missing or the chain goes in a circle.
func (s *Store) Chain(id string) ([]Manifest, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m, err := s.getLocked(id)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{id: true}
	chain := []Manifest{m.clone()}
	for m.ParentID != "" {
		parent, err := s.getLocked(m.ParentID)
		switch {
		case err != nil:
			// %v: that the ancestor is not found does not mean that id is not.
			return nil, errdefs.New(errdefs.ErrCorrupt, "ancestor %s of snapshot %s: %v", m.ParentID, id, err)
		case seen[parent.ID]:
			return nil, errdefs.New(errdefs.ErrCorrupt, "ancestors of snapshot %s go in a circle at %s", id, parent.ID)
		case len(chain) == maxDepth:
			return nil, errdefs.New(errdefs.ErrCorrupt, "snapshot %s has more than %d ancestors", id, maxDepth-1)
		}
		seen[parent.ID] = true
		chain = append(chain, parent.clone())
		m = parent
	}
	slices.Reverse(chain)
	return chain, nil
}

// States returns the chain of a snapshot as engines take it, root first.
func (s *Store) States(id string) ([]engine.State, error) {
	chain, err := s.Chain(id)
	if err != nil {
		return nil, err
	}
	out := make([]engine.State, len(chain))
	for i, m := range chain {
		out[i] = engine.State{ID: m.ID, Dir: s.Dir(m.ID)}
		for _, a := range m.Artifacts {
			out[i].Artifacts = append(out[i].Artifacts, a.Artifact)
		}
	}
	return out, nil
}

// Dependents returns the ids of the snapshots whose parent is id, sorted.
func (s *Store) Dependents(id string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.childrenLocked()[id]
}

// Descendants returns all snapshots that need id, each before its own parent: the
// order in which they can be removed.
func (s *Store) Descendants(id string) []string {
	s.mu.Lock()
	children := s.childrenLocked()
	s.mu.Unlock()
	var out []string
	seen := map[string]bool{id: true}
	// Breadth first gives parents before children.
	for queue := []string{id}; len(queue) > 0; queue = queue[1:] {
		for _, child := range children[queue[0]] {
			if !seen[child] {
				seen[child] = true
				out = append(out, child)
				queue = append(queue, child)
			}
		}
	}
	slices.Reverse(out)
	return out
}

// childrenLocked maps each parent to its children, broken ones included, sorted.
func (s *Store) childrenLocked() map[string][]string {
	out := map[string][]string{}
	for id, m := range s.ready {
		out[m.ParentID] = append(out[m.ParentID], id)
	}
	for id, b := range s.broken {
		out[b.parent] = append(out[b.parent], id)
	}
	delete(out, "")
	for _, ids := range out {
		slices.Sort(ids)
	}
	return out
}

// Lease keeps a snapshot, and so its ancestors, from being removed until release
// is called. Leases count: each needs its own release, which may be repeated.
func (s *Store) Lease(id, holder string) (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if what, ok := s.busy[id]; ok {
		return nil, errdefs.New(errdefs.ErrNotFound, "lease snapshot %s: it is %s", id, what)
	}
	if _, err := s.getLocked(id); err != nil {
		return nil, fmt.Errorf("lease for %s: %w", holder, err)
	}
	if s.leases[id] == nil {
		s.leases[id] = map[string]int{}
	}
	s.leases[id][holder]++
	released := false
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if released {
			return
		}
		released = true
		if s.leases[id][holder]--; s.leases[id][holder] == 0 {
			delete(s.leases[id], holder)
		}
		if len(s.leases[id]) == 0 {
			delete(s.leases, id)
		}
	}, nil
}

// Holders returns who has leased a snapshot, sorted.
func (s *Store) Holders(id string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.holdersLocked(id)
}

func (s *Store) holdersLocked(id string) []string {
	out := make([]string, 0, len(s.leases[id]))
	for h := range s.leases[id] {
		out = append(out, h)
	}
	slices.Sort(out)
	return out
}
