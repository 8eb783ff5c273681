package sandbox

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// drawTree is a tree in one line for each node, with ids replaced by names.
func drawTree(nodes []Node, names map[string]string) string {
	var out []string
	for _, n := range nodes {
		name := names[n.ID]
		if name == "" {
			name = string(n.Kind)
		}
		out = append(out, strings.Repeat(".", n.Depth)+name)
	}
	return strings.Join(out, " ")
}

// TestTree: sandboxes hang below the state they came from last, checkpoints and
// branches below the one before, and a reference shows its line only.
func TestTree(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	names := map[string]string{base.ID: "base"}
	a := w.forkWith(Fork{Snapshot: "base", N: 1, Name: "worker"})[0].ID
	b := w.fork("base", 1)[0].ID
	names[a], names[b] = "a", "b"
	one := must(w.svc.Checkpoint(w.ctx(), a, Checkpoint{Label: "start", Sync: true})).Snapshot.ID
	two := must(w.svc.Checkpoint(w.ctx(), a, Checkpoint{Sync: true})).Snapshot.ID
	names[one], names[two] = "one", "two"
	tree := func(ref string) string {
		t.Helper()
		return drawTree(must(w.svc.Tree(w.ctx(), ref)), names)
	}
	if got := tree(""); got != "base .one ..two ...a .b" && got != "base .b .one ..two ...a" {
		t.Errorf("the tree is %q", got)
	}
	must(w.svc.Rollback(w.ctx(), a, "start"))
	must(w.svc.Branch(w.ctx(), a, Branch{Tag: "side"}))
	c := w.fork("side", 1)[0].ID
	names[c] = "c"
	for ref, want := range map[string]string{
		"side": "base .one ..snapshot ...a ...c", "worker": "base .one ..snapshot ...a", two: "base .one ..two", b: "base .b",
	} {
		if got := tree(ref); got != want {
			t.Errorf("the tree of %.8s is %q, want %q", ref, got, want)
		}
	}
	for _, n := range must(w.svc.Tree(w.ctx(), "")) {
		if n.ID == one && (n.Name != "start" || n.Of != a || n.Kind != NodeCheckpoint) {
			t.Errorf("the checkpoint is %+v", n)
		}
	}
	w.host.Crash(fromMachine(w, a), "killed by a test")
	w.eventually("it is lost", func() bool { return must(w.svc.Sandbox(w.ctx(), a)).State == Lost })
	if got := tree(a); got != "base .one ..a" {
		t.Errorf("the tree of what is lost is %q", got)
	}
	_, err := w.svc.Tree(w.ctx(), "nothing")
	w.wantClass(err, errdefs.ErrNotFound)
}

// fromMachine is the id of a sandbox's machine.
func fromMachine(w *world, id string) string { return must(w.svc.Sandbox(w.ctx(), id)).machine() }

// TestOrderedEnds: parents that are gone, the node itself, or a circle.
func TestOrderedEnds(t *testing.T) {
	at := time.Unix(0, 0)
	nodes := func() []Node {
		return []Node{
			{ID: "gone", ParentID: "nowhere", CreatedAt: at}, {ID: "self", ParentID: "self", CreatedAt: at},
			{ID: "x", ParentID: "y", CreatedAt: at}, {ID: "y", ParentID: "x", CreatedAt: at},
		}
	}
	if got := fmt.Sprint(len(ordered(nodes(), "")), len(ordered(nodes(), "x")), len(ordered(nodes(), "self"))); got != "2 0 1" {
		t.Errorf("%s nodes", got)
	}
}
