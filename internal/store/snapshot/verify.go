package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
)

// Verify reads all files of a snapshot (not of its ancestors) again and compares
// them with what was published. The error joins everything that is wrong, each of
// class ErrCorrupt. The snapshot is leased meanwhile.
func (s *Store) Verify(ctx context.Context, id string) error {
	release, err := s.Lease(id, "verify")
	if err != nil {
		return err
	}
	defer release()
	m, err := s.Get(id)
	if err != nil {
		return err
	}
	errs := []error{s.verifyManifest(m), s.verifyUnlisted(m)}
	for _, a := range m.Artifacts {
		if err := s.verifyArtifact(ctx, m, a); err != nil {
			errs = append(errs, fmt.Errorf("artifact %s: %w", a.Name, err))
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("verify snapshot %s: %w", id, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return errdefs.WithHint(fmt.Errorf("verify snapshot %s: %w", id, err), "rebuild the snapshot, or remove it")
	}
	return nil
}

func (s *Store) verifyManifest(m Manifest) error {
	b, err := s.readManifest(m.ID)
	if err != nil {
		return err
	}
	now, err := decodeManifest(b)
	if err != nil {
		return err
	}
	if now.Checksum != m.Checksum {
		return errdefs.New(errdefs.ErrCorrupt, "its manifest was replaced")
	}
	return nil
}

func (s *Store) verifyUnlisted(m Manifest) error {
	return errdefs.As(errdefs.ErrCorrupt, checkUnlisted(s.Dir(m.ID), m))
}

func (s *Store) verifyArtifact(ctx context.Context, m Manifest, a Artifact) error {
	f, err := openRegular(filepath.Join(s.Dir(m.ID), a.Name))
	if err != nil {
		return errdefs.As(errdefs.ErrCorrupt, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() != a.Size {
		return errdefs.New(errdefs.ErrCorrupt, "it has %d bytes, not %d", info.Size(), a.Size)
	}
	digest, err := digestFile(ctx, f)
	if err != nil {
		return err
	}
	if digest != a.Digest {
		err = errdefs.New(errdefs.ErrCorrupt, "it has digest %s, not %s", digest, a.Digest)
	}
	// Where a layer is damaged its own checksums tell; they are nearer than a digest.
	return errors.Join(checkLayer(f, info.Size(), a, m.ParentID), verifyLayer(ctx, f, info.Size(), a), err)
}

// verifyLayer compares the data of a memory layer with its checksums.
func verifyLayer(ctx context.Context, f io.ReaderAt, size int64, a Artifact) error {
	if a.Format != layerfmt.Format {
		return nil
	}
	r, err := layerfmt.Open(f, size)
	if err != nil {
		return nil // checkLayer says so
	}
	return r.Verify(ctx)
}
