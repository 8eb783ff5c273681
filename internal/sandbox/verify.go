package sandbox

import (
	"context"
	"errors"
	"slices"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// Verify asks to read stored files again and compare them with what was stored.
type Verify struct {
	Snapshot string // reference; "" means all snapshots and images
	// Repair marks damaged snapshots, and what was made from them, as failed, so that
	// nothing is forked from them.
	Repair bool
}

// Verified is what was found about one snapshot or image.
type Verified struct {
	Kind  string // "snapshot" or "image"
	ID    string
	Name  string // first tag, or the image's name
	Bytes int64  // physical
	Err   error  // nil if it is whole
	// Marked: it was marked as failed. Rebuild is the command that makes it again, if
	// there is one.
	Marked  bool
	Rebuild string
}

// imageVerifier is an image store that can check its images.
type imageVerifier interface {
	Verify(ctx context.Context, id string) error
}

// Verify reads a snapshot with its ancestors and its image, or everything. The error
// is that of the work; what is damaged stands in the result, ancestors first.
func (s *Service) Verify(ctx context.Context, v Verify, progress Progress) ([]Verified, error) {
	if progress == nil {
		progress = func(string, float64) {}
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	ids, images, err := s.verifyTargets(ctx, v.Snapshot)
	if err != nil {
		return nil, err
	}
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return nil, err
	}
	var out []Verified
	total := float64(len(ids) + len(images))
	for _, id := range images {
		progress("reading image "+id, float64(len(out))/total)
		one := s.verifyImage(ctx, id)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	for _, id := range ids {
		progress("reading snapshot "+id, float64(len(out))/total)
		one, err := s.verifySnapshot(ctx, id)
		if errors.Is(err, errdefs.ErrNotFound) {
			continue // deleted meanwhile
		}
		if err != nil {
			return nil, err
		}
		if len(tags[id]) > 0 {
			one.Name = tags[id][0]
		}
		out = append(out, one)
	}
	if v.Repair {
		return out, s.markDamaged(ctx, out)
	}
	return out, nil
}

// verifyTargets lists what is to be read, parents before children.
func (s *Service) verifyTargets(ctx context.Context, ref string) (ids, images []string, err error) {
	if ref != "" {
		id, _, err := s.resolveSnapshot(ctx, ref)
		if err != nil {
			return nil, nil, err
		}
		chain, err := s.cfg.Store.Chain(id)
		if err != nil {
			return []string{id}, nil, nil // what is wrong is found again
		}
		for _, m := range chain {
			ids = append(ids, m.ID)
		}
		if img := chain[0].Image.ID; img != "" {
			images = append(images, img)
		}
		return ids, images, nil
	}
	for _, m := range s.cfg.Store.List() {
		ids = append(ids, m.ID)
	}
	for id := range s.cfg.Store.Broken() {
		ids = append(ids, id)
	}
	all, err := s.cfg.Images.List()
	for _, img := range all {
		images = append(images, img.ID)
	}
	return ids, images, err
}

func (s *Service) verifyImage(ctx context.Context, id string) Verified {
	out := Verified{Kind: "image", ID: id}
	img, err := s.cfg.Images.Get(id)
	if err != nil {
		out.Err = err
		return out
	}
	out.Name, out.Bytes = img.Name, img.Bytes
	if v, ok := s.cfg.Images.(imageVerifier); ok {
		out.Err = v.Verify(ctx, id)
	}
	if out.Err != nil && img.Name != "" {
		out.Rebuild = "forkd image build " + img.Name + " --replace"
	}
	return out
}

// verifySnapshot reads one snapshot. The error is not about its state.
func (s *Service) verifySnapshot(ctx context.Context, id string) (Verified, error) {
	out := Verified{Kind: "snapshot", ID: id}
	m, err := s.cfg.Store.Get(id)
	if errors.Is(err, errdefs.ErrNotFound) {
		return out, err
	}
	if out.Err = err; err == nil {
		for _, a := range m.Artifacts {
			out.Bytes += a.Bytes
		}
		out.Err = s.cfg.Store.Verify(ctx, id)
	}
	switch {
	case ctx.Err() != nil:
		return out, ctx.Err()
	case errors.Is(out.Err, errdefs.ErrNotFound):
		return out, out.Err
	case out.Err != nil && s.rebuildable(m) == nil:
		out.Rebuild = "forkd snapshot rebuild " + id
	}
	return out, nil
}

// markDamaged marks what is damaged, and all that was made from it, as failed.
func (s *Service) markDamaged(ctx context.Context, found []Verified) error {
	for i, v := range found {
		if v.Err == nil {
			continue
		}
		var ids []string
		if v.Kind == "image" {
			for _, m := range s.cfg.Store.List() {
				if m.Image.ID == v.ID {
					ids = append(ids, m.ID)
				}
			}
		} else {
			ids = append(s.cfg.Store.Descendants(v.ID), v.ID)
		}
		for _, id := range ids {
			reason := v.Err.Error()
			if id != v.ID {
				reason = "it needs " + v.Kind + " " + v.ID + ", which is damaged"
			}
			if err := s.markFailed(ctx, id, reason); err != nil {
				return err
			}
			if at := slices.IndexFunc(found, func(o Verified) bool { return o.ID == id }); at >= 0 {
				found[at].Marked = true
			}
		}
		found[i].Marked = v.Kind == "snapshot"
	}
	return nil
}

// maxReason bounds what a journal row says about a failure.
const maxReason = 1000

func (s *Service) markFailed(ctx context.Context, id, reason string) error {
	row, err := s.cfg.Journal.GetSnapshot(ctx, id)
	if errors.Is(err, errdefs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if row.Status == string(SnapshotFailed) {
		return nil
	}
	s.forgetPool(id)
	row.Status, row.Reason = string(SnapshotFailed), reason[:min(len(reason), maxReason)]
	return s.cfg.Journal.PutSnapshot(ctx, metadata.Snapshot{ID: row.ID, Status: row.Status, Reason: row.Reason, Dir: row.Dir, CreatedAt: row.CreatedAt})
}

// rebuildable tells why a snapshot cannot be made again from its recipe, or nil.
func (s *Service) rebuildable(m snapshot.Manifest) error {
	r := m.Recipe
	switch {
	case m.ID == "":
		return errdefs.New(errdefs.ErrCorrupt, "its manifest cannot be read")
	case m.Labels[labelBranchedFrom] != "" || m.Labels[labelCheckpointOf] != "":
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "it was captured from a running sandbox: there is no recipe"), "branch the sandbox again")
	case m.Labels[labelCompactedFrom] != "":
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "it is a compacted copy"), "rebuild the original and compact that")
	case r.Files != "":
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "files were copied into it that are not kept"), "make it again with: forkd snapshot --copy")
	case r.Image == "" && r.From == "":
		return errdefs.New(errdefs.ErrUnsupported, "its recipe names neither an image nor a snapshot")
	}
	return nil
}
