package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image/cpio"
)

// initramfsLayout is part of an initramfs' name: change it with what is in one.
const initramfsLayout = "forkd-initramfs-1"

const maxInitramfsFile = 64 << 20

// Root returns the files image id boots from. The initramfs is made if there is
// none of this image's kernel and the store's agent; others are kept, because
// snapshots hold their agents. So is the tree, if the store is asked for trees.
func (s *Store) Root(ctx context.Context, id string) (engine.Root, error) {
	img, err := s.Get(id)
	if err != nil {
		return engine.Root{}, err
	}
	fail := func(err error) (engine.Root, error) {
		return engine.Root{}, fmt.Errorf("open image %s: %w", img.ID, err)
	}
	disk := filepath.Join(s.imageDir(img.ID), diskFile)
	if info, err := os.Lstat(disk); err != nil || info.Size() != int64(img.DiskMiB)<<20 {
		return fail(errdefs.New(errdefs.ErrCorrupt, "its disk is missing or has the wrong size"))
	}
	k, err := s.openKernel(img.KernelDigest)
	if err != nil {
		return fail(errdefs.WithHint(errdefs.New(errdefs.ErrCorrupt, "its guest kernel %s: %w", img.KernelRelease, err), "build the image again with --replace"))
	}
	initramfs, err := s.initramfs(ctx, k)
	if err != nil {
		return fail(err)
	}
	root := engine.Root{Disk: disk, Kernel: filepath.Join(s.kernelDir(k.Digest), vmlinuxFile), Initramfs: initramfs}
	if s.cfg.Trees {
		if root.Tree, root.TreeDigest, err = s.tree(ctx, img); err != nil {
			return fail(fmt.Errorf("make its tree: %w", err))
		}
	}
	return root, nil
}

// initramfs returns the path of the initramfs of k and the store's agent.
func (s *Store) initramfs(ctx context.Context, k Kernel) (string, error) {
	if err := s.initramfsWork.acquire(ctx); err != nil {
		return "", err
	}
	defer s.initramfsWork.release()
	sum := sha256.Sum256([]byte(initramfsLayout + "\n" + k.Digest + "\n" + s.agentDigest + "\n"))
	path := filepath.Join(s.cfg.InitramfsDir, hex.EncodeToString(sum[:])+".cpio")
	if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
		return path, nil
	}
	data, err := s.buildInitramfs(k)
	if err != nil {
		return "", fmt.Errorf("build initramfs: %w", err)
	}
	if err := replaceFile(path, data, 0o444); err != nil {
		return "", fmt.Errorf("build initramfs: %w", err)
	}
	return path, nil
}

// buildInitramfs makes the archive: the agent as /init, the modules under names
// that sort in load order, and the nodes the kernel needs before devtmpfs.
func (s *Store) buildInitramfs(k Kernel) ([]byte, error) {
	var buf bytes.Buffer
	w := cpio.NewWriter(&buf)
	for _, dir := range []string{"dev", "proc", "sys", "newroot", modulesDir} {
		if err := w.Dir(dir, 0o755); err != nil {
			return nil, err
		}
	}
	err := errors.Join(
		w.CharDevice("dev/console", 0o600, 5, 1),
		w.CharDevice("dev/null", 0o666, 1, 3),
		w.File("init", 0o755, s.cfg.Agent))
	if err != nil {
		return nil, err
	}
	for _, m := range k.Modules {
		data, err := readBounded(filepath.Join(s.kernelDir(k.Digest), m.File), maxInitramfsFile)
		if err != nil {
			return nil, err
		}
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != m.SHA256 {
			return nil, errdefs.New(errdefs.ErrCorrupt, "module %s does not match its checksum", m.File)
		}
		if err := w.File(m.File, 0o644, data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}
