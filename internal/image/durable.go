package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
)

const (
	maxManifest = 1 << 20
	// tempPrefix starts the name of everything that is not (or no longer) whole.
	tempPrefix = ".tmp-"
)

// writeFile writes a new file whole, on disk when it returns.
func writeFile(path string, data []byte, perm fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return classify(fmt.Errorf("create file: %w", err))
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(perm), f.Sync(), f.Close())
	if err != nil {
		return classify(fmt.Errorf("write %s: %w", path, err))
	}
	return nil
}

// replaceFile puts data at path in one step: a reader sees the old or the new.
func replaceFile(path string, data []byte, perm fs.FileMode) error {
	dir := filepath.Dir(path)
	tmp := filepath.Join(dir, tempPrefix+filepath.Base(path))
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove leftover: %w", err)
	}
	if err := writeFile(tmp, data, perm); err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(tmp)))
	}
	return publish(tmp, path)
}

// publish renames a whole file or directory to its final name and syncs the
// directory they are in.
func publish(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return classify(fmt.Errorf("publish %s: %w", filepath.Base(to), err))
	}
	return syncPath(filepath.Dir(to))
}

// syncPath flushes a file or the entries of a directory.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return classify(fmt.Errorf("sync %s: %w", path, err))
	}
	return nil
}

// removeTemps removes what a crash left half-made in dir.
func removeTemps(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list %s: %w", dir, err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			if err := removeTree(context.Background(), filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("remove leftover %s: %w", e.Name(), err)
			}
		}
	}
	return nil
}

// envelope is how our JSON files lie on disk. SHA256 is of the compact body.
type envelope struct {
	Format int             `json:"format"`
	SHA256 string          `json:"sha256"`
	Body   json.RawMessage `json:"body"`
}

// seal encodes body for disk.
func seal(format int, body any) ([]byte, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	sum := sha256.Sum256(raw)
	out, err := json.MarshalIndent(envelope{format, hex.EncodeToString(sum[:]), raw}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return append(out, '\n'), nil
}

// unseal decodes what seal made into body, which is changed only on success.
func unseal(data []byte, format int, body any) error {
	if len(data) > maxManifest {
		return errdefs.New(errdefs.ErrCorrupt, "manifest has more than %d bytes", maxManifest)
	}
	var env envelope
	if err := json.Unmarshal(data, &env); err != nil {
		return errdefs.New(errdefs.ErrCorrupt, "decode manifest: %w", err)
	}
	if env.Format != format {
		return errdefs.New(errdefs.ErrIncompatible, "manifest has format %d, this build reads %d", env.Format, format)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, env.Body); err != nil {
		return errdefs.New(errdefs.ErrCorrupt, "decode manifest body: %w", err)
	}
	if sum := sha256.Sum256(compact.Bytes()); hex.EncodeToString(sum[:]) != env.SHA256 {
		return errdefs.New(errdefs.ErrCorrupt, "manifest does not match its checksum")
	}
	if err := json.Unmarshal(compact.Bytes(), body); err != nil {
		return errdefs.New(errdefs.ErrCorrupt, "decode manifest body: %w", err)
	}
	return nil
}

// readSealed reads a sealed file of bounded size.
func readSealed(path string, format int, body any) error {
	data, err := readBounded(path, maxManifest)
	if err != nil {
		return err
	}
	if err := unseal(data, format, body); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// readBounded reads a regular file of at most limit bytes.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, classify(fmt.Errorf("open file: %w", err))
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("stat %s: %w", path, err)
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, errdefs.New(errdefs.ErrCorrupt, "%s is no regular file of at most %d bytes", path, limit)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return data, nil
}

// classify gives file system errors the class a caller can act on.
func classify(err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return diskIsFull(err)
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.As(errdefs.ErrNotFound, err)
	case errors.Is(err, fs.ErrPermission):
		return errdefs.As(errdefs.ErrPermission, err)
	}
	return err
}

func diskIsFull(err error) error {
	return errdefs.WithHint(errdefs.As(errdefs.ErrResourceExhausted, err), "free disk space, or choose another --data-dir")
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// slot lets one caller through at a time and gives up with the context.
type slot chan struct{}

func newSlot() slot { return make(slot, 1) }

func (s slot) acquire(ctx context.Context) error {
	select {
	case s <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for earlier work on images: %w", ctx.Err())
	}
}

func (s slot) release() { <-s }
