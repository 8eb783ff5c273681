package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

func TestMappedUsersCommand(t *testing.T) {
	cmd := build(t.Context(), command{name: "tool", args: []string{"a b"}, isolate: mappedUsers}, "/bin/tool")
	args := strings.Join(cmd.Args, " ")
	if cmd.Path != "/usr/bin/unshare" || cmd.Err != nil || !strings.HasPrefix(args, "unshare --user --map-root-user --map-auto --mount --pid") || !slices.Equal(cmd.Args[len(cmd.Args)-2:], []string{"/bin/tool", "a b"}) {
		t.Errorf("command is %s %q", cmd.Path, cmd.Args)
	}
	if cmd.SysProcAttr.Cloneflags != 0 || !cmd.SysProcAttr.Setpgid || cmd.Cancel == nil {
		t.Errorf("attributes are %+v", cmd.SysProcAttr)
	}
}

// TestMappedTree makes, measures and removes a tree that belongs to other users.
func TestMappedTree(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("it shows what an ordinary user with subordinate ids can do, and this is root")
	}
	err := CheckBuilder(t.Context())
	if errors.Is(err, errdefs.ErrUnsupported) {
		t.Skip("this user has no subordinate ids: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(t.TempDir(), "tree")
	script := `mkdir -p "$0/locked" && echo x >"$0/locked/file" && chown -R 5:5 "$0/locked" && chmod 700 "$0/locked"`
	if _, err := run(t.Context(), command{name: "sh", args: []string{"-c", script, tree}, isolate: mappedUsers}); err != nil {
		t.Fatal(err)
	}
	size, err := measureMapped(t.Context(), tree)
	if err != nil || size.inodes != 3 || size.bytes == 0 {
		t.Errorf("size is %+v, %v", size, err)
	}
	if err := removeTree(context.Background(), tree); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(tree); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the tree is still there: %v", err)
	}
}
