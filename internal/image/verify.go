package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"forkd.dev/forkd/internal/errdefs"
)

// Verify reads the files of an image and its kernel again and compares them with
// their digests. The error joins what is wrong, of class ErrCorrupt.
func (s *Store) Verify(ctx context.Context, id string) error {
	img, err := s.Get(id)
	if err != nil {
		return err
	}
	errs := []error{s.verifyDisk(ctx, img), s.verifyTree(img)}
	if ctx.Err() == nil {
		errs = append(errs, s.verifyKernel(ctx, img.KernelDigest))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("verify image %s: %w", id, err)
	}
	return nil
}

func (s *Store) verifyDisk(ctx context.Context, img Image) error {
	digest, err := DigestDisk(ctx, filepath.Join(s.imageDir(img.ID), diskFile))
	if errors.Is(err, errdefs.ErrNotFound) {
		return errdefs.New(errdefs.ErrCorrupt, "its disk is missing")
	}
	if err == nil && digest != img.Digest {
		err = errdefs.New(errdefs.ErrCorrupt, "its disk has digest %s, not %s", digest, img.Digest)
	}
	return err
}

func (s *Store) verifyKernel(ctx context.Context, digest string) error {
	k, err := s.readKernel(digest)
	if errors.Is(err, errdefs.ErrNotFound) {
		return errdefs.New(errdefs.ErrCorrupt, "its kernel %s is missing", digest)
	}
	if err != nil {
		return err
	}
	for _, p := range k.parts() {
		if err := ctx.Err(); err != nil {
			return err
		}
		sum, err := digestPart(filepath.Join(s.kernelDir(digest), p.File))
		if err != nil {
			return err
		}
		if sum != p.SHA256 {
			return errdefs.New(errdefs.ErrCorrupt, "file %s of its kernel has SHA-256 %s, not %s", p.File, sum, p.SHA256)
		}
	}
	return nil
}

func digestPart(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", classify(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read %s: %w", filepath.Base(path), err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
