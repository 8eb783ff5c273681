package pack

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/errdefs"
)

// blockBytes is the unit in which data is told from zeros.
const blockBytes = 64 << 10

// copyBytes is how much is read at once.
const copyBytes = 1 << 20

// Content is a file that does not change.
type Content interface {
	io.ReaderAt
	io.Closer
	// NextData finds the first part at or after off that may hold something else than
	// zeros; ok is false if there is none.
	NextData(off int64) (start, end int64, ok bool, err error)
}

// Scan describes a file of size bytes under name: what is data in it, and its digest.
func Scan(ctx context.Context, name string, c Content, size int64) (File, error) {
	s := scan{file: File{Name: name, Size: size, Extents: [][2]int64{}}, hash: sha256.New()}
	buf, zero := make([]byte, blockBytes), make([]byte, blockBytes)
	for off := int64(0); off < size; {
		start, end, ok, err := c.NextData(off)
		if err != nil {
			return File{}, fmt.Errorf("find data of %s: %w", name, err)
		}
		if !ok {
			break
		}
		off = max(start, off) / blockBytes * blockBytes
		for ; off < min(end, size); off += blockBytes {
			if err := ctx.Err(); err != nil {
				return File{}, err
			}
			b := buf[:min(blockBytes, size-off)]
			if err := readFull(c, b, off); err != nil {
				return File{}, fmt.Errorf("read %s: %w", name, err)
			}
			if string(b) != string(zero[:len(b)]) {
				s.data(off, b)
			}
		}
	}
	s.file.SHA256 = hex.EncodeToString(s.hash.Sum(nil))
	if s.file.Stored == size {
		s.file.Extents = nil
	}
	return s.file, nil
}

type scan struct {
	file File
	hash hash.Hash
	end  int64 // of the last block with data
}

// data takes a block with data. Ranges of data may begin and end within one block.
func (s *scan) data(off int64, b []byte) {
	list := s.file.Extents
	if len(list) > 0 && off < s.end {
		return // seen
	}
	s.hash.Write(b)
	s.file.Stored += int64(len(b))
	if n := len(list); n > 0 && s.end == off {
		list[n-1][1] += int64(len(b))
	} else {
		s.file.Extents = append(list, [2]int64{off, int64(len(b))})
	}
	s.end = off + int64(len(b))
}

func readFull(r io.ReaderAt, b []byte, off int64) error {
	n, err := r.ReadAt(b, off)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		err = errdefs.New(errdefs.ErrCorrupt, "it ends at %d, %d bytes were to be read at %d", off+int64(n), len(b), off)
	}
	return err
}

// Write writes a pack of the files that m lists, as Scan described them.
func Write(ctx context.Context, w io.Writer, m Manifest, open func(name string) (Content, error)) (err error) {
	raw, err := encode(m)
	if err != nil {
		return err
	}
	z, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return fmt.Errorf("write pack: %w", err)
	}
	defer func() {
		if err != nil {
			_ = z.Close() // only to free it: what was written is not a pack
		}
	}()
	t := tar.NewWriter(z)
	if err := entry(t, m, ManifestName, int64(len(raw))); err != nil {
		return err
	}
	if _, err := t.Write(raw); err != nil {
		return fmt.Errorf("write pack: %w", err)
	}
	for _, f := range m.Files {
		if err := entry(t, m, f.Name, f.Stored); err != nil {
			return err
		}
		if err := writeFile(ctx, t, f, open); err != nil {
			return fmt.Errorf("write %s to the pack: %w", f.Name, err)
		}
	}
	return errors.Join(t.Close(), z.Close())
}

func entry(t *tar.Writer, m Manifest, name string, size int64) error {
	err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o600, ModTime: m.CreatedAt})
	if err != nil {
		return fmt.Errorf("write pack: %w", err)
	}
	return nil
}

func writeFile(ctx context.Context, w io.Writer, f File, open func(name string) (Content, error)) error {
	c, err := open(f.Name)
	if err != nil {
		return err
	}
	defer c.Close()
	h := sha256.New()
	buf := make([]byte, copyBytes)
	for _, e := range f.extents() {
		for off, end := e[0], e[0]+e[1]; off < end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			b := buf[:min(copyBytes, end-off)]
			if err := readFull(c, b, off); err != nil {
				return err
			}
			h.Write(b)
			if _, err := w.Write(b); err != nil {
				return err
			}
			off += int64(len(b))
		}
	}
	if sum := hex.EncodeToString(h.Sum(nil)); sum != f.SHA256 {
		return errdefs.New(errdefs.ErrCorrupt, "it changed while it was packed")
	}
	return nil
}
