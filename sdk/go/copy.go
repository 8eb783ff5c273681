package forkd

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	slash "path"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// Copy names a file or directory of this machine and its place in a guest: an
// absolute path or, if it ends in a slash, the directory to put it into. Links
// inside of a directory stay links; everything belongs to root in the guest.
type Copy struct {
	From, To string
}

// CreateSnapshotWith is CreateSnapshot with files that are there before anything
// else is done. They are sent as they are read, at most 1 GiB of them.
func (c *Client) CreateSnapshotWith(ctx context.Context, req SnapshotRequest, copies []Copy, progress Progress) (Snapshot, error) {
	if len(copies) == 0 {
		return c.CreateSnapshot(ctx, req, progress)
	}
	for _, one := range copies {
		if err := one.check(); err != nil {
			return Snapshot{}, err
		}
	}
	var out Snapshot
	err := streamed(req, copies, func(body io.Reader) (err error) {
		out, err = c.createSnapshot(ctx, body, progress)
		return err
	})
	return out, err
}

// streamed calls send with an archive of a request and files, which is made while
// it is read.
func streamed(req any, copies []Copy, send func(body io.Reader) error) error {
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() { // ends when the reader is closed
		err := packRequest(w, req, copies)
		_ = w.CloseWithError(err)
		packed <- err
	}()
	err := send(io.Reader(r))
	_ = r.CloseWithError(errStop)
	// A file that cannot be read is why the daemon got no whole request; that it
	// wants no more of them is its answer's to explain.
	perr := <-packed
	if err != nil && perr != nil && !errors.Is(perr, errStop) && !errors.Is(perr, io.ErrClosedPipe) {
		return perr
	}
	return err
}

func (c Copy) check() error {
	bad := func(why string) error {
		return errdefs.New(errdefs.ErrInvalid, "copy %s to %q: %s", c.From, c.To, why)
	}
	switch {
	case c.From == "":
		return bad("there is no source")
	case !slash.IsAbs(c.To) || strings.Contains(c.To, "\x00"):
		return bad("the place in the guest is no absolute path")
	case slash.Clean(c.To) == "/" && !strings.HasSuffix(c.To, "/"):
		return bad("the place in the guest is the root directory")
	}
	if _, err := os.Stat(c.From); err != nil {
		return errdefs.New(errdefs.ErrInvalid, "copy to %s: %w", c.To, err)
	}
	return nil
}

func packRequest(w io.Writer, req any, copies []Copy) error {
	head, err := packHead(req)
	if err != nil {
		return err
	}
	if _, err := io.Copy(w, head); err != nil {
		return err
	}
	archive := tar.NewWriter(w)
	for _, c := range copies {
		if err := c.pack(archive); err != nil {
			return err
		}
	}
	return archive.Close()
}

// pack adds what c names to an archive.
func (c Copy) pack(archive *tar.Writer) error {
	from, err := filepath.EvalSymlinks(c.From)
	if err != nil {
		return errdefs.New(errdefs.ErrInvalid, "copy %s: %w", c.From, err)
	}
	to := slash.Clean(c.To)
	if strings.HasSuffix(c.To, "/") {
		abs, err := filepath.Abs(c.From)
		if err != nil {
			return errdefs.New(errdefs.ErrInvalid, "copy %s: %w", c.From, err)
		}
		to = slash.Join(to, filepath.Base(abs))
	}
	return filepath.WalkDir(from, func(name string, d fs.DirEntry, err error) error {
		if err == nil {
			var rel string
			if rel, err = filepath.Rel(from, name); err == nil {
				err = packEntry(archive, name, strings.TrimPrefix(slash.Join(to, filepath.ToSlash(rel)), "/"), d)
			}
		}
		if err != nil {
			return errdefs.New(errdefs.ErrInvalid, "copy %s: %w", name, err)
		}
		return nil
	})
}

func packEntry(archive *tar.Writer, name, to string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	link := ""
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		if link, err = os.Readlink(name); err != nil {
			return err
		}
	case !info.IsDir() && !info.Mode().IsRegular():
		return errdefs.New(errdefs.ErrInvalid, "it is no file, directory or link")
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname = to, 0, 0, "", ""
	if info.IsDir() {
		h.Name += "/"
	}
	if err := archive.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	// A file that grows meanwhile is copied as it was.
	n, err := io.CopyN(archive, f, info.Size())
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("it became shorter while it was read, by %d bytes", info.Size()-n)
	}
	return err
}
