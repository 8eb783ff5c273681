package sandbox

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/snapshot"
)

// NodeKind says what a node of the tree is.
type NodeKind string

// The kinds of nodes.
const (
	NodeSnapshot   NodeKind = "snapshot"
	NodeCheckpoint NodeKind = "checkpoint"
	NodeSandbox    NodeKind = "sandbox"
)

// Node is one state, or a sandbox that lives on from one. Its parent is the state it
// came from.
type Node struct {
	ID       string
	Kind     NodeKind
	ParentID string // "" for a root
	Depth    int    // below its root
	Name     string // of a sandbox, or the tags of a snapshot, or the label of a checkpoint
	State    string // of a sandbox or snapshot
	// Of is the sandbox that a checkpoint belongs to or a branch came from.
	Of        string
	Auto      bool // a schedule made it
	Labels    map[string]string
	CreatedAt time.Time
}

// Tree lists snapshots, checkpoints and living sandboxes, each after its parent. With a
// reference only what it comes from and what came from it.
func (s *Service) Tree(ctx context.Context, ref string) ([]Node, error) {
	only := ""
	if ref != "" {
		var err error
		if only, err = s.nodeOf(ctx, ref); err != nil {
			return nil, err
		}
	}
	nodes, err := s.nodes(ctx)
	if err != nil {
		return nil, err
	}
	return ordered(nodes, only), nil
}

// nodeOf finds the id that a reference means: of a snapshot, else of a sandbox.
func (s *Service) nodeOf(ctx context.Context, ref string) (string, error) {
	id, _, err := s.resolveSnapshot(ctx, ref)
	if errdefs.Class(err) != errdefs.ErrNotFound {
		return id, err
	}
	e, err := s.resolve(ref)
	if err != nil {
		return "", errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "there is no snapshot or sandbox %q", ref), "list all with: forkd tree")
	}
	return e.snapshot().ID, nil
}

func (s *Service) nodes(ctx context.Context) ([]Node, error) {
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return nil, err
	}
	var out []Node
	for _, m := range s.cfg.Store.List() {
		if from := m.Labels[labelMadeFrom]; from != "" {
			if _, err := s.cfg.Store.Get(from); err == nil {
				m.ParentID = from // what it came from, not what its layers lie on
			}
		}
		status, _ := s.status(ctx, m)
		out = append(out, snapshotNode(m, tags[m.ID], string(status)))
	}
	for _, e := range s.known() {
		info := e.snapshot()
		if !info.State.living() && info.State != Lost || info.State == Creating {
			continue
		}
		out = append(out, Node{
			ID: info.ID, Kind: NodeSandbox, ParentID: e.origin(), Name: info.Name, State: string(info.State),
			Labels: inherited(info), CreatedAt: info.CreatedAt,
		})
	}
	return out, nil
}

func snapshotNode(m snapshot.Manifest, tags []string, status string) Node {
	n := Node{
		ID: m.ID, Kind: NodeSnapshot, ParentID: cmp.Or(m.ParentID, m.Labels[labelCompactedFrom]), Name: strings.Join(tags, ", "),
		State: status, Of: m.Labels[labelBranchedFrom], Labels: inherited(Sandbox{Labels: m.Labels}), CreatedAt: m.CreatedAt,
	}
	if of := m.Labels[labelCheckpointOf]; of != "" {
		n.Kind, n.Of, n.Auto = NodeCheckpoint, of, m.Labels[labelAuto] != ""
		n.Name = cmp.Or(m.Labels[labelText], n.Name)
	}
	return n
}

// origin is the state that a sandbox came from last: what it was forked from, captured
// to or rolled back to.
func (e *entry) origin() string {
	if e.alive() {
		if id := e.machine.Parent(); id != "" {
			return id
		}
	}
	return e.snapshot().base()
}

// ordered sorts nodes so that each stands behind its parent, children by age. With
// only, what is neither above nor below that node is left out. A parent that is gone
// makes a root; a manifest that lies about its parents makes no endless tree.
func ordered(nodes []Node, only string) []Node {
	byID := make(map[string]*Node, len(nodes))
	for i := range nodes {
		byID[nodes[i].ID] = &nodes[i]
	}
	children := map[string][]*Node{}
	for i := range nodes {
		n := &nodes[i]
		if byID[n.ParentID] == nil || n.ParentID == n.ID {
			n.ParentID = ""
		}
		children[n.ParentID] = append(children[n.ParentID], n)
	}
	for _, list := range children {
		slices.SortFunc(list, func(a, b *Node) int {
			return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
		})
	}
	keep := lineage(byID, only)
	out := make([]Node, 0, len(nodes))
	type step struct {
		n     *Node
		depth int
		kept  bool // below only
	}
	var todo []step
	push := func(parent string, depth int, kept bool) {
		for _, n := range slices.Backward(children[parent]) {
			todo = append(todo, step{n, depth, kept})
		}
	}
	push("", 0, only == "")
	for len(todo) > 0 {
		at := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		kept := at.kept || at.n.ID == only
		if !kept && !keep[at.n.ID] {
			continue
		}
		at.n.Depth = at.depth
		out = append(out, *at.n)
		push(at.n.ID, at.depth+1, kept)
	}
	return out
}

// lineage is the set of a node's ancestors.
func lineage(byID map[string]*Node, id string) map[string]bool {
	out := map[string]bool{}
	for n := byID[id]; n != nil && !out[n.ID]; n = byID[n.ParentID] {
		out[n.ID] = true
	}
	return out
}
