package resttest

import (
	"context"
	"fmt"
	"slices"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// CreateSnapshot implements rest.Snapshots.
func (s *Service) CreateSnapshot(_ context.Context, c sandbox.CreateSnapshot, progress sandbox.Progress) (sandbox.Snapshot, error) {
	if progress != nil {
		progress("boot", 0.5)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Err != nil {
		return sandbox.Snapshot{}, s.Err
	}
	if i := s.taggedLocked(c.Tag); i >= 0 && !c.Replace {
		return sandbox.Snapshot{}, errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "tag %q is taken", c.Tag), "use --replace to move it")
	}
	s.changes++
	sn := s.snapshots[0]
	sn.ID = fmt.Sprintf("sn%020d", len(s.snapshots)+1)
	sn.Tags = []string{c.Tag}
	sn.Recipe = sandbox.Recipe{Image: c.Image, From: c.From, Warm: c.Warm, Exec: c.Exec}
	sn.Labels = c.Labels
	if c.From != "" {
		sn.ParentID, sn.Depth = s.snapshots[0].ID, 1
	}
	s.snapshots = append(s.snapshots, sn)
	return sn, nil
}

// taggedLocked returns the index of the snapshot with a tag, or -1.
func (s *Service) taggedLocked(ref string) int {
	return slices.IndexFunc(s.snapshots, func(sn sandbox.Snapshot) bool { return sn.ID == ref || slices.Contains(sn.Tags, ref) })
}

// Snapshots implements rest.Snapshots.
func (s *Service) Snapshots(context.Context) ([]sandbox.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.snapshots), s.Err
}

// Snapshot implements rest.Snapshots.
func (s *Service) Snapshot(_ context.Context, ref string) (sandbox.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Err != nil {
		return sandbox.Snapshot{}, s.Err
	}
	if i := s.taggedLocked(ref); i >= 0 {
		return s.snapshots[i], nil
	}
	return sandbox.Snapshot{}, errdefs.New(errdefs.ErrNotFound, "there is no snapshot %q", ref)
}

// DeleteSnapshot implements rest.Snapshots.
func (s *Service) DeleteSnapshot(ctx context.Context, ref string, d sandbox.Delete) error {
	sn, err := s.Snapshot(ctx, ref)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.snapshots {
		if other.ParentID == sn.ID && !d.Cascade && !d.Force {
			return errdefs.New(errdefs.ErrConflict, "snapshot %s has dependents: %s", ref, other.Tags[0])
		}
	}
	s.changes++
	s.snapshots = slices.DeleteFunc(s.snapshots, func(other sandbox.Snapshot) bool { return other.ID == sn.ID })
	return nil
}

// GiveTag implements rest.Tags.
func (s *Service) GiveTag(ctx context.Context, ref, tag string, t sandbox.Tagging) error {
	if _, err := s.Snapshot(ctx, ref); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taggedLocked(tag) >= 0 && !t.Replace {
		return errdefs.New(errdefs.ErrConflict, "tag %q is taken", tag)
	}
	s.changes++
	i := s.taggedLocked(ref)
	s.snapshots[i].Tags = append(slices.Clone(s.snapshots[i].Tags), tag)
	return nil
}

// Untag implements rest.Tags.
func (s *Service) Untag(_ context.Context, tag string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.taggedLocked(tag)
	if i < 0 {
		return errdefs.New(errdefs.ErrNotFound, "there is no tag %q", tag)
	}
	s.changes++
	s.snapshots[i].Tags = slices.DeleteFunc(slices.Clone(s.snapshots[i].Tags), func(t string) bool { return t == tag })
	return nil
}

// BuildImage implements rest.Images.
func (s *Service) BuildImage(_ context.Context, b sandbox.BuildImage, progress sandbox.Progress) (sandbox.Image, error) {
	if progress != nil {
		progress("packages", 0.3)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Err != nil {
		return sandbox.Image{}, s.Err
	}
	s.changes++
	im := s.images[0]
	im.ID, im.Name, im.Packages, im.Builtin, im.UsedBy = fmt.Sprintf("im%020d", len(s.images)+1), b.Name, b.Packages, false, nil
	s.images = append(s.images, im)
	return im, nil
}

// Images implements rest.Images.
func (s *Service) Images(context.Context) ([]sandbox.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.images), s.Err
}

// Image implements rest.Images.
func (s *Service) Image(_ context.Context, ref string) (sandbox.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, im := range s.images {
		if im.ID == ref || im.Name == ref {
			return im, s.Err
		}
	}
	return sandbox.Image{}, errdefs.New(errdefs.ErrNotFound, "there is no image %q", ref)
}

// RemoveImage implements rest.Images.
func (s *Service) RemoveImage(ctx context.Context, ref string) error {
	im, err := s.Image(ctx, ref)
	if err != nil {
		return err
	}
	if len(im.UsedBy) > 0 {
		return errdefs.New(errdefs.ErrConflict, "image %s is used by %s", ref, im.UsedBy[0])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes++
	s.images = slices.DeleteFunc(s.images, func(other sandbox.Image) bool { return other.ID == im.ID })
	return nil
}
