package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
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
		asOrdinaryUser(t)
		return
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

// asOrdinaryUser runs the test again as a user who is made for it, subordinate ids
// and all, and removed afterwards.
func asOrdinaryUser(t *testing.T) {
	t.Helper()
	for _, tool := range []string{"useradd", "userdel", "newuidmap", "setpriv"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("there is no %s: run make setup", tool)
		}
	}
	name := fmt.Sprintf("forkdtest%d", os.Getpid())
	// The test binary must be where that user may read it.
	dir, err := os.MkdirTemp("/var/tmp", "forkd-usertest-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	self, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "image.test")
	if err := errors.Join(os.WriteFile(program, self, 0o755), os.Chmod(dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "useradd", "--no-create-home", "--home-dir", dir, name).CombinedOutput(); err != nil {
		t.Fatalf("make a user: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.CommandContext(context.Background(), "userdel", name).CombinedOutput(); err != nil {
			t.Errorf("remove the user: %v: %s", err, out)
		}
	})
	cmd := exec.CommandContext(t.Context(), "setpriv", "--reuid="+name, "--regid="+name, "--init-groups", program, "-test.run=^TestMappedTree$", "-test.v")
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestMappedTree") {
		t.Errorf("as an ordinary user: %v:\n%s", err, out)
	}
}
