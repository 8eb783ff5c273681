package cli

import (
	"strings"
	"testing"

	forkd "forkd.dev/forkd/sdk/go"
)

// TestDrawTree: lines join what belongs together, whatever depths a daemon tells.
func TestDrawTree(t *testing.T) {
	nodes := []forkd.TreeNode{
		{ID: "a", Kind: "snapshot", Name: "base"},
		{ID: "b", Kind: "checkpoint", ParentID: "a", Depth: 1, Name: "start"},
		{ID: "c", Kind: "snapshot", ParentID: "b", Depth: 2},
		{ID: "d", Kind: "sandbox", ParentID: "c", Depth: 3, Name: "deep", State: "lost"},
		{ID: "e", Kind: "sandbox", ParentID: "b", Depth: 2, Name: "x\x1b[2J"},
		{ID: "f", Kind: "sandbox", ParentID: "a", Depth: 1},
		{ID: "g", Kind: "snapshot"},
		{ID: "h", Kind: "snapshot", ParentID: "z", Depth: 99},
		{ID: "i", Kind: "snapshot", ParentID: "h", Depth: -4},
	}
	want := `□ base
├─ ◇ start
│  ├─ □ c
│  │  └─ ○ deep
│  └─ ● x[2J
└─ ● f
□ g
└─ □ h
□ i`
	if got := strings.Join(drawTree(nodes), "\n"); got != want {
		t.Errorf("drawn:\n%s\nwant:\n%s", got, want)
	}
	var deep []forkd.TreeNode
	for i := range 1000 {
		deep = append(deep, forkd.TreeNode{ID: strings.Repeat("x", i%7), Depth: i})
	}
	for _, line := range drawTree(deep) {
		if len([]rune(line)) > 4*maxDrawnDepth {
			t.Fatalf("a line has %d characters", len(line))
		}
	}
}
