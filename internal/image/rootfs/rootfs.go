// Package rootfs unpacks a root file system from a tar archive that nobody has
// checked, as root of this host: whatever the archive says, nothing outside of the
// given directory is read, written or changed.
//
// All work on files goes through an [os.Root], which follows links only inside of
// the directory; an entry behind an absolute link is refused, since no archive of
// a real root file system has one. Owners, modes, device nodes, file capabilities
// and times are taken over. Bytes and entries are bounded, so that neither a
// compression bomb nor a million empty files can fill the host.
package rootfs

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// Limits bound what an archive may hold.
type Limits struct {
	Bytes   int64 // of content
	Entries int
}

// Type bits of stat(2), as MakeNode takes them.
const (
	typeFIFO  = 0o010000
	typeChar  = 0o020000
	typeBlock = 0o060000
)

// Result is what was unpacked.
type Result struct {
	Digest  string // "sha256:" and the digest of the bytes that were read
	Entries int
	Bytes   int64
}

// Extract unpacks the archive r (plain, or compressed by gzip, zstd or xz) into
// dir, which exists and is empty. progress is told the bytes of content so far.
func Extract(ctx context.Context, r io.Reader, dir string, limits Limits, progress func(bytes int64)) (Result, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Result{}, fmt.Errorf("open root file system: %w", err)
	}
	defer root.Close()
	sum := sha256.New()
	in := &source{ctx: ctx, r: io.TeeReader(r, sum)}
	plain, done, err := decompress(bufio.NewReaderSize(in, 1<<16))
	if err != nil {
		return Result{}, readError(err)
	}
	defer done()
	x := &extractor{root: root, limits: limits, progress: progress}
	// Headers count too: an archive of endless headers has no content.
	bounded := &io.LimitedReader{R: plain, N: limits.Bytes + int64(limits.Entries)*maxHeaders + 1<<20}
	if err := x.all(tar.NewReader(bounded)); err != nil {
		return Result{}, err
	}
	if x.count == 0 {
		return Result{}, errdefs.New(errdefs.ErrInvalid, "the archive holds no files")
	}
	if _, err := io.Copy(io.Discard, in); err != nil { // to the digest of all of it
		return Result{}, readError(err)
	}
	return Result{Digest: "sha256:" + hex.EncodeToString(sum.Sum(nil)), Entries: x.count, Bytes: x.bytes}, nil
}

// maxHeaders is what one entry may take for its name and attributes, on average.
const maxHeaders = 4 << 10

// source is a reader that ends with a context.
type source struct {
	ctx context.Context //nolint:containedctx // it lives as long as one call
	r   io.Reader
}

func (s *source) Read(p []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		return 0, err
	}
	return s.r.Read(p)
}

// readError gives damage its class. Errors of the context and of who sends keep theirs.
func readError(err error) error {
	if class := errdefs.Class(err); class == errdefs.ErrInternal {
		err = errdefs.As(errdefs.ErrInvalid, err)
	}
	return fmt.Errorf("read archive: %w", err)
}

type extractor struct {
	root     *os.Root
	limits   Limits
	progress func(int64)
	count    int
	bytes    int64
}

func (x *extractor) all(archive *tar.Reader) error {
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return readError(err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if x.count++; x.count > x.limits.Entries {
			return errdefs.New(errdefs.ErrInvalid, "the archive holds more than %d entries", x.limits.Entries)
		}
		if err := x.entry(h, archive); err != nil {
			return fmt.Errorf("unpack %.200q: %w", h.Name, err)
		}
	}
}

// clean returns the path of a name inside of the root, "." for the root itself.
func clean(name string) (string, error) {
	if strings.ContainsRune(name, 0) || len(name) > 4096 {
		return "", errdefs.New(errdefs.ErrInvalid, "its name is no path")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", errdefs.New(errdefs.ErrInvalid, "its name leads out of the root file system")
		}
	}
	return path.Join(".", strings.TrimLeft(name, "/")), nil
}

func (x *extractor) entry(h *tar.Header, content io.Reader) error {
	name, err := clean(h.Name)
	if err != nil {
		return err
	}
	if name == "." {
		return x.rootDirectory(h)
	}
	if h.Uid < 0 || h.Gid < 0 || h.Uid > 1<<32-2 || h.Gid > 1<<32-2 {
		return errdefs.New(errdefs.ErrInvalid, "owner %d:%d", h.Uid, h.Gid)
	}
	if err := x.makeRoom(h, name); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		err = x.file(h, name, content)
	case tar.TypeDir:
		err = x.root.Mkdir(name, 0o700)
		if errors.Is(err, fs.ErrExist) {
			err = nil
		}
	case tar.TypeSymlink:
		err = x.root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return x.link(h, name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		err = x.node(h, name)
	default:
		return errdefs.New(errdefs.ErrUnsupported, "entries of type %q", string(rune(h.Typeflag)))
	}
	if err != nil {
		return inside(err)
	}
	return inside(x.settle(h, name))
}

// inside gives errors of paths that lead elsewhere their class.
func inside(err error) error {
	if err == nil || errdefs.Class(err) != errdefs.ErrInternal || errors.Is(err, fs.ErrPermission) {
		return err
	}
	var at *fs.PathError
	var link *os.LinkError
	if errors.As(err, &at) || errors.As(err, &link) {
		return errdefs.WithHint(errdefs.As(errdefs.ErrInvalid, err), "entries behind absolute links or files are not unpacked")
	}
	return err
}

func (x *extractor) rootDirectory(h *tar.Header) error {
	if h.Typeflag != tar.TypeDir {
		return errdefs.New(errdefs.ErrInvalid, "the root is no directory")
	}
	return x.root.Chmod(".", mode(h)|0o500)
}

// makeRoom makes the directories above name and takes away what an earlier entry
// of the same name made.
func (x *extractor) makeRoom(h *tar.Header, name string) error {
	if dir := path.Dir(name); dir != "." {
		if err := x.root.MkdirAll(dir, 0o755); err != nil {
			return inside(err)
		}
	}
	info, err := x.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return inside(err)
	case info.IsDir() && h.Typeflag == tar.TypeDir:
		return nil
	case info.IsDir():
		return errdefs.New(errdefs.ErrInvalid, "an earlier entry made a directory of it")
	}
	return inside(x.root.Remove(name))
}

func (x *extractor) file(h *tar.Header, name string, content io.Reader) error {
	if x.bytes += h.Size; x.bytes > x.limits.Bytes || h.Size < 0 {
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "the archive holds more than %d MiB", x.limits.Bytes>>20),
			"ask for a larger disk with --disk")
	}
	f, err := x.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.Copy(f, content); err != nil {
		var at *fs.PathError
		if errors.As(err, &at) { // ours
			return errdefs.New(errdefs.ErrResourceExhausted, "write it: %w", err)
		}
		return readError(err)
	}
	x.progress(x.bytes)
	// Before attributes: a change of the owner takes capabilities away.
	if err := f.Chown(h.Uid, h.Gid); err != nil {
		return err
	}
	for key, value := range h.PAXRecords {
		attr, ok := strings.CutPrefix(key, "SCHILY.xattr.")
		if !ok || attr != "security.capability" && !strings.HasPrefix(attr, "user.") {
			continue
		}
		if err := linux.SetAttribute(f, attr, []byte(value)); err != nil {
			return err
		}
	}
	return f.Close()
}

func (x *extractor) link(h *tar.Header, name string) error {
	target, err := clean(h.Linkname)
	if err != nil {
		return err
	}
	if info, err := x.root.Lstat(target); err != nil || info.IsDir() {
		return errdefs.New(errdefs.ErrInvalid, "it links to %.200q, which no earlier entry made", h.Linkname)
	}
	return inside(x.root.Link(target, name))
}

func (x *extractor) node(h *tar.Header, name string) error {
	if h.Devmajor < 0 || h.Devminor < 0 || h.Devmajor > 1<<12-1 || h.Devminor > 1<<20-1 {
		return errdefs.New(errdefs.ErrInvalid, "device %d:%d", h.Devmajor, h.Devminor)
	}
	dir, err := x.root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	defer dir.Close()
	bits := map[byte]uint32{tar.TypeChar: typeChar, tar.TypeBlock: typeBlock, tar.TypeFifo: typeFIFO}[h.Typeflag]
	// The directory that holds the tree can be entered by root only.
	return linux.MakeNode(dir, path.Base(name), bits|0o600, uint32(h.Devmajor), uint32(h.Devminor))
}

// settle gives an entry its owner, mode and time.
func (x *extractor) settle(h *tar.Header, name string) error {
	if h.Typeflag != tar.TypeReg {
		if err := x.root.Lchown(name, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	if h.Typeflag == tar.TypeSymlink {
		return nil
	}
	if err := x.root.Chmod(name, mode(h)); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeReg || h.ModTime.IsZero() {
		return nil
	}
	return x.root.Chtimes(name, h.ModTime, h.ModTime)
}

// mode is the permission bits of a header, with set-id and sticky bits.
func mode(h *tar.Header) fs.FileMode {
	m := fs.FileMode(h.Mode).Perm()
	for bit, flag := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if h.Mode&bit != 0 {
			m |= flag
		}
	}
	return m
}
