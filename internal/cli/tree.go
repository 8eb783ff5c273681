package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	forkd "forkd.dev/forkd/sdk/go"
)

func (a *app) treeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "tree [SNAPSHOT|SANDBOX]",
		Short: "Show where states and sandboxes come from",
		Long: "Draw snapshots, checkpoints and living sandboxes, each below the state it came from last.\n" +
			"With an argument, only what that comes from and what came from it.",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeOne(a.snapshotNames, a.sandboxNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.tree(cmd.Context(), strings.Join(args, ""))
		},
	}
}

func (a *app) tree(ctx context.Context, ref string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	nodes, err := c.Tree(ctx, ref)
	if err != nil {
		return err
	}
	l := listing{json: nodes, header: []string{"TREE", "ID", "KIND", "STATE", "AGE"}}
	for i, line := range drawTree(nodes) {
		n := nodes[i]
		kind := n.Kind
		if n.Auto {
			kind = "automatic " + kind
		}
		l.ids = append(l.ids, n.ID)
		l.rows = append(l.rows, []string{line, n.ID, kind, n.State, a.age(n.CreatedAtUnix)})
	}
	return a.list(l)
}

// mark is what stands before a name in the tree.
func mark(n forkd.TreeNode) string {
	switch {
	case n.Kind == "sandbox" && n.State == "lost":
		return "○ "
	case n.Kind == "sandbox":
		return "● "
	case n.Kind == "checkpoint":
		return "◇ "
	}
	return "□ "
}

// maxDrawnDepth keeps a long line of checkpoints on the screen: what is deeper is
// drawn at this depth.
const maxDrawnDepth = 40

// drawTree returns a line for each node, which come in the order of a walk.
func drawTree(nodes []forkd.TreeNode) []string {
	last := lastChildren(nodes)
	lines := make([]string, len(nodes))
	open := make([]bool, 0, maxDrawnDepth) // whether the line at a depth goes on below
	for i, n := range nodes {
		depth := min(max(n.Depth, 0), maxDrawnDepth, len(open)+1)
		if depth == 0 {
			open = open[:0]
			lines[i] = mark(n) + nodeName(n)
			continue
		}
		open = open[:min(depth-1, len(open))]
		var b strings.Builder
		for _, on := range open {
			if on {
				b.WriteString("│  ")
			} else {
				b.WriteString("   ")
			}
		}
		if last[n.ID] {
			b.WriteString("└─ ")
		} else {
			b.WriteString("├─ ")
		}
		for len(open) < depth-1 {
			open = append(open, false)
		}
		open = append(open, !last[n.ID])
		lines[i] = b.String() + mark(n) + nodeName(n)
	}
	return lines
}

// lastChildren are the nodes that no sibling follows.
func lastChildren(nodes []forkd.TreeNode) map[string]bool {
	newest := map[string]string{} // parent -> its last child
	for _, n := range nodes {
		newest[n.ParentID] = n.ID
	}
	out := make(map[string]bool, len(newest))
	for _, id := range newest {
		out[id] = true
	}
	return out
}

func nodeName(n forkd.TreeNode) string {
	if n.Name != "" {
		return oneLine(n.Name)
	}
	if len(n.ID) > 10 {
		return n.ID[:10]
	}
	return n.ID
}
