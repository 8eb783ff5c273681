package sandbox

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/guest"
)

// Limits of files that are copied into a build. The agent has the same.
const (
	maxCopyBytes   = 1 << 30
	maxCopyEntries = 500_000
	// maxCopyOverhead is what the archive may have beside content.
	maxCopyOverhead = 512 << 20
)

// spooled is an archive of files on this host's disk. Its file has no name: it
// goes with this process at the latest.
type spooled struct {
	file   *os.File
	digest string
	bytes  int64 // of content
	count  int
}

func (s *spooled) close() {
	if s != nil {
		_ = s.file.Close()
	}
}

// spool takes in an archive before anything is made, so that neither a slow nor a
// wrong one keeps a machine waiting. r may be nil.
func (s *Service) spool(ctx context.Context, r io.Reader) (_ *spooled, err error) {
	if r == nil {
		return nil, nil
	}
	f, err := os.CreateTemp(s.cfg.Dir, ".files-")
	if err != nil {
		return nil, fmt.Errorf("keep files to copy: %w", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	if err := os.Remove(f.Name()); err != nil {
		return nil, fmt.Errorf("keep files to copy: %w", err)
	}
	in := &intake{ctx: ctx, r: r, file: f, sum: sha256.New(), left: maxCopyBytes + maxCopyOverhead}
	out := &spooled{file: f}
	if err := out.check(tar.NewReader(in)); err != nil {
		return nil, err
	}
	// What follows the end mark is padding, and part of the digest.
	if _, err := io.Copy(io.Discard, in); err != nil {
		return nil, err
	}
	out.digest = "sha256:" + hex.EncodeToString(in.sum.Sum(nil))
	return out, nil
}

// check reads the archive to its end, which also stores it.
func (s *spooled) check(archive *tar.Reader) error {
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			if errdefs.Class(err) == errdefs.ErrInternal {
				err = errdefs.As(errdefs.ErrInvalid, err)
			}
			return fmt.Errorf("read files to copy: %w", err)
		}
		if s.count++; s.count > maxCopyEntries {
			return errdefs.New(errdefs.ErrInvalid, "more than %d files to copy", maxCopyEntries)
		}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeXGlobalHeader:
		default:
			return errdefs.New(errdefs.ErrInvalid, "copy %.200q: it is no file, directory or link", h.Name)
		}
		if s.bytes += h.Size; s.bytes > maxCopyBytes || h.Size < 0 {
			return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "more than %d MiB of files to copy", maxCopyBytes>>20),
				"put large data into an image: forkd image build --from-tar")
		}
	}
}

// intake stores and sums what is read of an archive.
type intake struct {
	ctx  context.Context //nolint:containedctx // it lives as long as one call
	r    io.Reader
	file *os.File
	sum  hash.Hash
	left int64
}

func (in *intake) Read(p []byte) (int, error) {
	if err := in.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := in.r.Read(p)
	if in.left -= int64(n); in.left < 0 {
		return 0, errdefs.New(errdefs.ErrInvalid, "the archive of files is larger than %d MiB", (maxCopyBytes+maxCopyOverhead)>>20)
	}
	in.sum.Write(p[:n])
	if _, werr := in.file.Write(p[:n]); werr != nil {
		return 0, errdefs.New(errdefs.ErrResourceExhausted, "keep files to copy: %w", werr)
	}
	return n, err
}

// copyFiles puts the files into the builder machine.
func (b *builder) copyFiles(ctx context.Context) error {
	if b.files == nil {
		return nil
	}
	if _, err := b.files.file.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("read files to copy: %w", err)
	}
	what := fmt.Sprintf("copying %d files, %s", b.files.count, bytesText(b.files.bytes))
	return b.ticking(what, func() error {
		return b.call(ctx, b.req.ExecTimeout, func(ctx context.Context, a Agent) error { return guest.Unpack(ctx, a, b.files.file) })
	})
}
