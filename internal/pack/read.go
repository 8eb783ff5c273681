package pack

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/errdefs"
)

// Limits are what a reader accepts.
type Limits struct {
	MaxBytes int64 // stored bytes of all files together
	MaxSize  int64 // of one file, holes included
}

// maxWindow bounds what the decompressor keeps; writers use 8 MiB at most.
const maxWindow = 32 << 20

// entryOverhead bounds what an archive spends on an entry besides its data: padding,
// and headers for names and sizes that do not fit the plain one.
const entryOverhead = 4 << 10

// Target takes the stored parts of one file. Whoever made it has given the file its
// size; parts that are not written are zero.
type Target interface {
	io.WriterAt
	io.Closer
}

// Reader is an open pack. It is used by one goroutine and read once.
type Reader struct {
	src      *source
	z        *zstd.Decoder
	budget   *budget
	t        *tar.Reader
	manifest Manifest
}

// budget is a reader of which only so much may be read.
type budget struct {
	r    io.Reader
	left int64
}

var errTooLong = errdefs.New(errdefs.ErrCorrupt, "pack is longer than it says")

func (b *budget) Read(p []byte) (int, error) {
	if b.left <= 0 {
		// Its end is fine, a byte more is not.
		var one [1]byte
		n, err := b.r.Read(one[:])
		if n > 0 {
			return 0, errTooLong
		}
		return 0, err
	}
	n, err := b.r.Read(p[:min(int64(len(p)), b.left)])
	b.left -= int64(n)
	return n, err
}

// Open reads the manifest of a pack and checks it against l. The caller closes the
// reader.
func Open(r io.Reader, l Limits) (*Reader, error) {
	src := &source{r: r}
	z, err := zstd.NewReader(src, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, fmt.Errorf("open pack: %w", src.broken(err))
	}
	p := &Reader{src: src, z: z, budget: &budget{r: z, left: MaxManifestBytes + 2*entryOverhead}}
	p.t = tar.NewReader(p.budget)
	if err := p.open(l); err != nil {
		z.Close()
		return nil, fmt.Errorf("open pack: %w", src.broken(err))
	}
	return p, nil
}

func (p *Reader) open(l Limits) error {
	h, err := p.t.Next()
	if errors.Is(err, io.EOF) {
		return errdefs.New(errdefs.ErrCorrupt, "it is empty")
	}
	if err != nil {
		return err
	}
	if err := plain(h); err != nil {
		return err
	}
	if h.Name != ManifestName || h.Size > MaxManifestBytes {
		return errdefs.New(errdefs.ErrCorrupt, "it begins with %.80q of %d bytes, not with its manifest", h.Name, h.Size)
	}
	raw, err := io.ReadAll(io.LimitReader(p.t, MaxManifestBytes+1))
	if err != nil {
		return err
	}
	if p.manifest, err = decode(raw); err != nil {
		return err
	}
	for _, f := range p.manifest.Files {
		if f.Size > l.MaxSize {
			return errdefs.New(errdefs.ErrResourceExhausted, "file %s has %d bytes, more than %d", f.Name, f.Size, l.MaxSize)
		}
	}
	if sum := p.manifest.StoredBytes(); sum > l.MaxBytes {
		return errdefs.New(errdefs.ErrResourceExhausted, "it holds %d bytes, there is room for %d", sum, l.MaxBytes)
	}
	// From here on exactly what is listed may come. 1 KiB of zeros ends the archive.
	p.budget.left = 2 * entryOverhead
	for _, f := range p.manifest.Files {
		p.budget.left += f.Stored + entryOverhead
	}
	return nil
}

// Manifest says what the pack holds.
func (p *Reader) Manifest() Manifest { return p.manifest }

// Close frees the decompressor.
func (p *Reader) Close() { p.z.Close() }

// Extract reads all files in their order into the targets that create returns; nil
// stands for a file that is only checked. When it returns nil the pack was whole and
// every digest right. Otherwise nothing of what was written is to be used.
func (p *Reader) Extract(ctx context.Context, create func(File) (Target, error)) error {
	for i, f := range p.manifest.Files {
		if err := p.extract(ctx, f, create); err != nil {
			return fmt.Errorf("unpack %s (file %d of %d): %w", f.Name, i+1, len(p.manifest.Files), err)
		}
	}
	if h, err := p.t.Next(); err == nil {
		return errdefs.New(errdefs.ErrCorrupt, "unpack: there is a file %.80q that is not listed", h.Name)
	} else if !errors.Is(err, io.EOF) {
		return fmt.Errorf("unpack: %w", p.src.broken(err))
	}
	var one [1]byte
	switch n, err := io.ReadFull(p.budget, one[:]); {
	case n > 0:
		return fmt.Errorf("unpack: %w", errTooLong)
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("unpack: %w", p.src.broken(err))
	}
	return nil
}

func (p *Reader) extract(ctx context.Context, f File, create func(File) (Target, error)) (err error) {
	h, err := p.t.Next()
	if errors.Is(err, io.EOF) {
		return errdefs.New(errdefs.ErrCorrupt, "the pack ends before it")
	}
	if err != nil {
		return p.src.broken(err)
	}
	if err := plain(h); err != nil {
		return err
	}
	if h.Name != f.Name || h.Size != f.Stored {
		return errdefs.New(errdefs.ErrCorrupt, "in its place is %.80q with %d bytes, not %d", h.Name, h.Size, f.Stored)
	}
	target, err := create(f)
	if err != nil {
		return err
	}
	if target != nil {
		defer func() { err = errors.Join(err, target.Close()) }()
	}
	hash := sha256.New()
	buf := make([]byte, copyBytes)
	for _, e := range f.extents() {
		for off, end := e[0], e[0]+e[1]; off < end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			b := buf[:min(copyBytes, end-off)]
			if _, err := io.ReadFull(p.t, b); err != nil {
				return p.src.broken(err)
			}
			hash.Write(b)
			if target != nil {
				if _, err := target.WriteAt(b, off); err != nil {
					return err
				}
			}
			off += int64(len(b))
		}
	}
	if sum := hex.EncodeToString(hash.Sum(nil)); sum != f.SHA256 {
		return errdefs.New(errdefs.ErrCorrupt, "it has SHA-256 %s, not %s", sum, f.SHA256)
	}
	return nil
}

// plain refuses entries that are no plain files: links, devices, directories, and
// sparse files, whose length has nothing to do with what was read.
func plain(h *tar.Header) error {
	if h.Typeflag != tar.TypeReg {
		return errdefs.New(errdefs.ErrCorrupt, "entry %.80q is of type %q, not a plain file", h.Name, h.Typeflag)
	}
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse") {
			return errdefs.New(errdefs.ErrCorrupt, "entry %.80q is a sparse file", h.Name)
		}
	}
	return nil
}

// source remembers why reading stopped, so that a failure to read is not taken for
// damage.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		s.err = err
	}
	return n, err
}

// broken says what an error of reading means. The formats below have many errors, and
// all of them are damage.
func (s *source) broken(err error) error {
	switch {
	case s.err != nil:
		return fmt.Errorf("read pack: %w", s.err)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return errdefs.New(errdefs.ErrCorrupt, "the pack is cut off")
	case errdefs.Class(err) == errdefs.ErrInternal:
		return errdefs.As(errdefs.ErrCorrupt, err)
	}
	return err
}
