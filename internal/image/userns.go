package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"forkd.dev/forkd/internal/errdefs"
)

// Builds of an ordinary user run in a user namespace, where the user is root and
// the other owners of a root file system are subordinate ids of the user
// (subuid(5)). What such a build made belongs to those ids: only inside of such a
// namespace it can be read, measured and removed.

// buildIsolation is how builds are kept apart from the host.
func buildIsolation() isolation {
	if os.Geteuid() == 0 {
		return privateMounts
	}
	return mappedUsers
}

// unshareArgs start a program as root of new namespaces, with all ids mapped.
func unshareArgs() []string {
	return []string{"--user", "--map-root-user", "--map-auto", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--"}
}

// CheckBuilder says why this user cannot build images here, and what to do.
func CheckBuilder(ctx context.Context) error {
	if os.Geteuid() == 0 {
		return nil
	}
	_, err := run(ctx, command{name: "true", isolate: mappedUsers})
	if err == nil || ctx.Err() != nil {
		return err
	}
	return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "build an image as an ordinary user, in a user namespace: %w", err),
		"give this user subordinate ids: apt-get install uidmap; usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER. "+
			"Or build the image with a daemon of root and copy its folders images and kernels into this data directory, owned by this user")
}

// measureMapped is measureTree for a tree whose owners are mapped.
func measureMapped(ctx context.Context, dir string) (treeSize, error) {
	var size treeSize
	var wrong error
	seen := map[string]bool{}
	_, err := run(ctx, command{
		name: "find", args: []string{dir, "-printf", `forkd %b %i %n %y\n`}, isolate: mappedUsers,
		onLine: func(line string) {
			var blocks, links int64
			var inode, kind string
			// A file's name stands in no line of ours.
			if n, err := fmt.Sscanf(line, "forkd %d %s %d %s", &blocks, &inode, &links, &kind); n != 4 || err != nil {
				wrong = errdefs.New(errdefs.ErrInternal, "measure root file system: find says %.80q", line)
				return
			}
			if links > 1 && kind != "d" {
				if seen[inode] {
					return
				}
				seen[inode] = true
			}
			size.inodes++
			size.bytes += blocks * 512
		},
	})
	return size, errors.Join(err, wrong)
}

// removeTree removes a tree that a build made.
func removeTree(ctx context.Context, dir string) error {
	err := os.RemoveAll(dir)
	if err == nil || os.Geteuid() == 0 || !errors.Is(err, fs.ErrPermission) {
		return err
	}
	_, err = run(ctx, command{name: "rm", args: []string{"-rf", "--one-file-system", "--", dir}, isolate: mappedUsers})
	return err
}
