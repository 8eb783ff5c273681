package cgroup

import (
	"os"
	"path/filepath"
	"testing"
)

// TestGroupsStandBesideAService plays the files of a v2 hierarchy: the kernel of a
// test host may have none.
func TestGroupsStandBesideAService(t *testing.T) {
	root := t.TempDir()
	slice := filepath.Join(root, "forkd.slice")
	own := filepath.Join(slice, "forkd.service")
	if err := os.MkdirAll(own, 0o755); err != nil {
		t.Fatal(err)
	}
	control := filepath.Join(slice, "cgroup.subtree_control")
	if err := os.WriteFile(control, []byte("memory\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	got, ok := besideService(own, []string{"memory", "pids"})
	if !ok || got != slice {
		t.Errorf("groups go to %q, %v, want %s", got, ok, slice)
	}
	if b, err := os.ReadFile(control); err != nil || string(b) != "+pids" && string(b) != "+pidsy\n" {
		t.Errorf("the slice was told %q, %v", b, err)
	}
	for _, other := range []string{filepath.Join(root, "session-1.scope"), filepath.Join(root, "no.slice", "gone.service")} {
		if got, ok := besideService(other, []string{"memory"}); ok {
			t.Errorf("groups of %s go to %s", other, got)
		}
	}
}
