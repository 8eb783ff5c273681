package snapshot

import (
	"context"
	"fmt"
	"path/filepath"

	"forkd.dev/forkd/internal/errdefs"
)

// ManifestBytes returns the manifest file of a snapshot as it is stored.
func (s *Store) ManifestBytes(id string) ([]byte, error) {
	if _, err := s.Get(id); err != nil {
		return nil, err
	}
	return s.readManifest(id)
}

// DecodeManifest reads and checks the manifest file of another store.
func DecodeManifest(b []byte) (Manifest, error) { return decodeManifest(b) }

// Same tells whether two manifests are of the same snapshot: its files, and what they
// mean. Labels and what depends on the place do not count.
func Same(a, b Manifest) bool {
	if a.ID != b.ID || a.ParentID != b.ParentID || a.Image.ID != b.Image.ID || a.Compat != b.Compat || a.Shape != b.Shape || len(a.Artifacts) != len(b.Artifacts) {
		return false
	}
	for i, x := range a.Artifacts {
		y := b.Artifacts[i]
		if x.Name != y.Name || x.Kind != y.Kind || x.Format != y.Format || x.Size != y.Size || x.Digest != y.Digest {
			return false
		}
	}
	return true
}

// PublishCopy publishes files that another store wrote, with their manifest: first it
// compares them with its digests. ErrCorrupt: they differ.
func (st *Staging) PublishCopy(ctx context.Context, m Manifest) (Manifest, error) {
	if err := st.checkCopy(ctx, m); err != nil {
		return Manifest{}, fmt.Errorf("publish a copy of snapshot %s: %w", st.id, err)
	}
	return st.Publish(ctx, m)
}

func (st *Staging) checkCopy(ctx context.Context, m Manifest) error {
	if err := m.check(); err != nil {
		return errdefs.New(errdefs.ErrCorrupt, "manifest: %w", err)
	}
	for _, a := range m.Artifacts {
		f, err := openRegular(filepath.Join(st.dir, a.Name))
		if err != nil {
			return errdefs.New(errdefs.ErrCorrupt, "artifact %s: %w", a.Name, err)
		}
		digest, err := digestFile(ctx, f)
		if err == nil && digest != a.Digest {
			err = errdefs.New(errdefs.ErrCorrupt, "it has digest %s, not %s", digest, a.Digest)
		}
		if err == nil {
			err = verifyLayer(ctx, f, a.Size, a)
		}
		_ = f.Close() // only read
		if err != nil {
			return fmt.Errorf("artifact %s: %w", a.Name, err)
		}
	}
	return nil
}
