package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

const (
	minDiskMiB     = 512
	maxDiskMiB     = 1 << 20
	defaultDiskMiB = 4096

	diskLabel = "forkd-root"
	// journalMiB is small because every block of a journal that a sandbox has
	// wrapped around becomes part of its disk layer.
	journalMiB = 16
	// Small disks get an inode per 8 KiB, for trees of many small files; an inode
	// table costs no space until it is used.
	denseInodesMiB = 64 << 10
)

// mke2fsConf replaces the host's mke2fs.conf, so that a disk does not depend on it.
// All features are known to Linux 5.10 and later.
const mke2fsConf = `[defaults]
	base_features = sparse_super,large_file,filetype,resize_inode,dir_index,ext_attr
	default_mntopts = acl,user_xattr
	blocksize = 4096
	inode_size = 256
	reserved_ratio = 0
[fs_types]
	ext4 = {
		features = has_journal,extent,huge_file,flex_bg,metadata_csum,64bit,dir_nlink,extra_isize
	}
`

// makeDisk writes the tree to a new, sparse ext4 disk of mib MiB at disk.
func makeDisk(ctx context.Context, tree, disk string, mib int) error {
	measure := measureMapped
	isolate := mappedUsers
	if os.Geteuid() == 0 {
		isolate = shareAll
		measure = func(_ context.Context, dir string) (treeSize, error) { return measureTree(dir) }
	}
	size, err := measure(ctx, tree)
	if err != nil {
		return err
	}
	if need := size.bytes>>20 + journalMiB; need > int64(mib) {
		return tooSmall(mib, need, nil)
	}
	conf := disk + ".conf"
	if err := writeFile(conf, []byte(mke2fsConf), 0o600); err != nil {
		return err
	}
	defer os.Remove(conf)
	if err := createSparse(disk, int64(mib)<<20); err != nil {
		return err
	}
	args, err := mke2fsArgs(ctx, tree, disk, mib, size.inodes)
	if err != nil {
		return err
	}
	_, err = run(ctx, command{name: "mke2fs", args: args, env: []string{"MKE2FS_CONFIG=" + conf}, isolate: isolate})
	switch tail := tailOf(err); {
	case err == nil:
		return nil
	case diskFull.MatchString(tail):
		return diskIsFull(fmt.Errorf("the host's disk is full: %w", err))
	case guestDiskFull.MatchString(tail):
		return tooSmall(mib, size.bytes>>20+journalMiB, err)
	}
	return err
}

var guestDiskFull = regexp.MustCompile(`(?i)could not allocate (block|inode) in ext2 filesystem|no free space`)

func tooSmall(mib int, need int64, cause error) error {
	err := errdefs.New(errdefs.ErrInvalid, "the root file system needs more than %d MiB and does not fit a disk of %d MiB", need, mib)
	if cause != nil {
		err = errors.Join(err, cause)
	}
	return errdefs.WithHint(err, "ask for a larger disk, e.g. --disk %d", max(2*need, 2*int64(mib)))
}

func createSparse(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return classify(fmt.Errorf("create disk: %w", err))
	}
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		return classify(fmt.Errorf("create disk: %w", err))
	}
	return nil
}

func mke2fsArgs(ctx context.Context, tree, disk string, mib int, inodes int64) ([]string, error) {
	// Tables are not left to the guest's kernel to initialise: each fork would do it
	// again. That the file is a hole already saves writing their zeros.
	options := "lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0"
	prezeroed, err := supportsPrezeroed(ctx)
	if err != nil {
		return nil, err
	}
	if prezeroed {
		options += ",assume_storage_prezeroed=1"
	}
	bytesPerInode := int64(16384)
	if mib <= denseInodesMiB {
		bytesPerInode = 8192
	}
	count := max(int64(mib)<<20/bytesPerInode, 2*inodes)
	return []string{
		"-q", "-F", "-t", "ext4", "-L", diskLabel, "-m", "0", "-N", strconv.FormatInt(count, 10),
		"-J", "size=" + strconv.Itoa(journalMiB), "-E", options, "-d", tree, disk,
	}, nil
}

// supportsPrezeroed tells whether mke2fs is 1.47 or later.
func supportsPrezeroed(ctx context.Context) (bool, error) {
	var major, minor int
	_, err := run(ctx, command{name: "mke2fs", args: []string{"-V"}, onLine: func(line string) {
		if major == 0 {
			_, _ = fmt.Sscanf(line, "mke2fs %d.%d", &major, &minor)
		}
	}})
	return major > 1 || major == 1 && minor >= 47, err
}

// DigestDisk returns the digest of a disk's content as it stands in a manifest:
// "sparse-sha256:" and the SHA-256 of the 8-byte little-endian size, followed by
// the index (8 bytes, little-endian) and content of each block of 64 KiB that is
// not all zero, the last one padded with zeros. It depends on the content only,
// not on which holes the file has, yet reads only data.
func DigestDisk(ctx context.Context, path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", classify(fmt.Errorf("digest disk: %w", err))
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", fmt.Errorf("digest disk: %w", err)
	}
	h := sha256.New()
	var word [8]byte
	put := func(v int64) {
		binary.LittleEndian.PutUint64(word[:], uint64(v))
		h.Write(word[:])
	}
	put(info.Size())
	buf, zero := make([]byte, digestBlock), make([]byte, digestBlock)
	for index := int64(0); ; index++ {
		start, _, more, err := linux.NextData(f, index*digestBlock)
		if err != nil {
			return "", fmt.Errorf("digest disk: %w", err)
		}
		if !more {
			break
		}
		index = start / digestBlock
		if ctx.Err() != nil {
			return "", fmt.Errorf("digest disk: %w", ctx.Err())
		}
		n, err := f.ReadAt(buf, index*digestBlock)
		if err != nil && !errors.Is(err, io.EOF) {
			return "", fmt.Errorf("digest disk: %w", err)
		}
		clear(buf[n:])
		if !bytes.Equal(buf, zero) {
			put(index)
			h.Write(buf)
		}
	}
	return "sparse-sha256:" + hex.EncodeToString(h.Sum(nil)), nil
}

const digestBlock = 64 << 10

// physicalBytes is what a file takes on the host.
func physicalBytes(path string) (int64, error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, fmt.Errorf("measure disk: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, errdefs.New(errdefs.ErrInternal, "measure disk: no status of %s", filepath.Base(path))
	}
	return st.Blocks * 512, nil
}
