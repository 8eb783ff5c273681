package agent

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/agentwire/link"
	"forkd.dev/forkd/internal/errdefs"
)

// Limits of an archive.
const (
	maxCopyBytes   = 1 << 30
	maxCopyEntries = 500_000
)

// serveFiles unpacks an archive at the root of the file system.
func (a *Agent) serveFiles(st *link.Stream) {
	st.Accept()
	defer st.Close()
	u := unpacker{dir: a.path("/"), limit: maxCopyBytes}
	err := u.unpack(st)
	agentwire.WriteAnswer(st, "", err)
	st.CloseWrite()
	drain(st) // the answer must not be lost in an abort
}

// unpacker writes an archive below dir. Everything belongs to root, set-id bits
// are dropped, and links of the file system are followed as cp follows them: it
// is the guest's own.
type unpacker struct {
	dir     string
	only    []string // directories below dir that take entries; none means all do
	limit   int64    // of all content
	entries int
}

func (u *unpacker) unpack(r io.Reader) error {
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return errdefs.New(errdefs.ErrInvalid, "unpack files: %w", err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if u.entries++; u.entries > maxCopyEntries {
			return errdefs.New(errdefs.ErrResourceExhausted, "unpack files: more than %d of them", maxCopyEntries)
		}
		if err := u.entry(h, archive); err != nil {
			return unpackError(h.Name, err)
		}
	}
}

func unpackError(name string, err error) error {
	class := errdefs.Class(err)
	if errors.Is(err, fs.ErrExist) {
		class = errdefs.ErrConflict
	}
	return errdefs.New(class, "unpack %.200q: %w", name, err)
}

// place is where an entry or the target of a hard link lies: below dir, whatever
// its name says.
func (u *unpacker) place(name string) string {
	return filepath.Join(u.dir, filepath.Clean("/"+name))
}

func (u *unpacker) takes(path string) bool {
	return len(u.only) == 0 || slices.ContainsFunc(u.only, func(dir string) bool {
		return strings.HasPrefix(path, u.place(dir)+"/")
	})
}

func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	path := u.place(h.Name)
	if !u.takes(path) {
		return errdefs.New(errdefs.ErrInvalid, "there is no place for it")
	}
	mode := os.FileMode(h.Mode).Perm()
	if h.Typeflag == tar.TypeDir {
		info, err := os.Stat(path)
		if err == nil && info.IsDir() {
			return nil
		}
		return errors.Join(os.MkdirAll(path, 0o755), os.Chmod(path, mode))
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if info, err := os.Lstat(path); err == nil {
		if info.IsDir() {
			return errdefs.New(errdefs.ErrConflict, "a directory is in its place")
		}
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeReg:
		return u.file(path, mode, h, content)
	case tar.TypeSymlink:
		if h.Linkname == "" || strings.Contains(h.Linkname, "\x00") {
			return errdefs.New(errdefs.ErrInvalid, "link to nothing")
		}
		return os.Symlink(h.Linkname, path)
	case tar.TypeLink:
		return os.Link(u.place(h.Linkname), path)
	}
	return errdefs.New(errdefs.ErrUnsupported, "entries of type %q are not copied", string(rune(h.Typeflag)))
}

func (u *unpacker) file(path string, mode os.FileMode, h *tar.Header, content io.Reader) error {
	if u.limit -= h.Size; u.limit < 0 {
		return errdefs.New(errdefs.ErrResourceExhausted, "the files have more bytes than are allowed")
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content)
	if err = errors.Join(err, f.Chmod(mode), f.Close()); err != nil {
		return err
	}
	if h.ModTime.IsZero() {
		return nil
	}
	return os.Chtimes(path, h.ModTime, h.ModTime)
}
