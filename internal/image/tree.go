package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// The tree of an image is its root file system in the form that a user-space kernel
// reads: an EROFS file, made of the disk when it is first asked for and kept beside
// it. Its name holds its digest. Nothing of it depends on when or where it was made:
// state captured on one host finds the same file on another.

const (
	treePrefix = "tree-"
	treeSuffix = ".erofs"
	// treeUUID is the same in all trees, which must not differ for nothing.
	treeUUID = "00000000-0000-0000-0000-000000000000"
)

// treeOf returns the path of the tree in an image's directory and its digest, or
// ErrNotFound.
func treeOf(dir string) (path, digest string, err error) {
	found, err := filepath.Glob(filepath.Join(dir, treePrefix+"*"+treeSuffix))
	if err != nil || len(found) == 0 {
		return "", "", errdefs.New(errdefs.ErrNotFound, "the image has no tree")
	}
	name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(found[0]), treePrefix), treeSuffix)
	return found[0], name, nil
}

// tree returns the tree of an image, which is made if there is none.
func (s *Store) tree(ctx context.Context, img Image) (path, digest string, err error) {
	dir := s.imageDir(img.ID)
	if path, digest, err = treeOf(dir); err == nil {
		return path, digest, nil
	}
	if err := s.treeWork.acquire(ctx); err != nil {
		return "", "", err
	}
	defer s.treeWork.release()
	if path, digest, err = treeOf(dir); err == nil {
		return path, digest, nil
	}
	return s.makeTree(ctx, dir)
}

// makeTree reads the disk with debugfs, not with the host's kernel, which is to parse
// no file system that a sandbox may have had in its hands.
func (s *Store) makeTree(ctx context.Context, dir string) (path, digest string, err error) {
	if err := checkFree(s.cfg.Dir); err != nil {
		return "", "", err
	}
	tmp, err := os.MkdirTemp(s.cfg.Dir, tempPrefix)
	if err != nil {
		return "", "", classify(err)
	}
	defer func() { err = errors.Join(err, removeTree(context.WithoutCancel(ctx), tmp)) }()
	files, file := filepath.Join(tmp, "files"), filepath.Join(tmp, "tree")
	if err := errors.Join(os.Mkdir(files, 0o755), os.Chmod(files, 0o755)); err != nil {
		return "", "", classify(err)
	}
	if err := dumpDisk(ctx, filepath.Join(dir, diskFile), tmp, filepath.Base(files)); err != nil {
		return "", "", err
	}
	args := []string{"--quiet", "-T0", "--preserve-mtime", "-U", treeUUID, "-E", "noinline_data", file, files}
	if _, err := run(ctx, command{name: "mkfs.erofs", args: args, isolate: treeIsolation()}); err != nil {
		return "", "", err
	}
	sum, err := digestPart(file)
	if err != nil {
		return "", "", err
	}
	if err := os.Chmod(file, 0o444); err != nil {
		return "", "", classify(err)
	}
	if err := syncPath(file); err != nil {
		return "", "", err
	}
	path = filepath.Join(dir, treePrefix+sum+treeSuffix)
	return path, sum, publish(file, path)
}

// treeIsolation lets an ordinary user keep the owners of files.
func treeIsolation() isolation {
	if os.Geteuid() == 0 {
		return shareAll
	}
	return mappedUsers
}

// dumpDisk writes the files of a disk into the directory name of dir. debugfs ends
// well whatever happened, so what it says decides.
func dumpDisk(ctx context.Context, disk, dir, name string) error {
	var wrong error
	_, err := run(ctx, command{
		name: "debugfs", args: []string{"-R", "rdump / " + name, disk}, dir: dir, isolate: treeIsolation(),
		onLine: func(line string) {
			if wrong == nil && !strings.HasPrefix(line, "debugfs ") && strings.TrimSpace(line) != "" {
				wrong = errdefs.New(errdefs.ErrInternal, "debugfs says: %.200s", line)
			}
		},
	})
	if err := errors.Join(err, wrong); err != nil {
		return fmt.Errorf("read disk: %w", err)
	}
	return nil
}

// verifyTree reads the tree of an image again, if it has one.
func (s *Store) verifyTree(img Image) error {
	path, digest, err := treeOf(s.imageDir(img.ID))
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	sum, err := digestPart(path)
	if err == nil && sum != digest {
		err = errdefs.WithHint(errdefs.New(errdefs.ErrCorrupt, "its tree has SHA-256 %s, not %s", sum, digest),
			"remove %s: it is made again of the disk", path)
	}
	return err
}
