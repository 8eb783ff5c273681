package sandbox

import (
	"context"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/image"
)

// BuildImage builds an image of Debian with packages, or of an archive.
func (s *Service) BuildImage(ctx context.Context, b BuildImage, progress Progress) (Image, error) {
	if err := s.checkOpen(); err != nil {
		return Image{}, err
	}
	if progress == nil {
		progress = func(string, float64) {}
	}
	if err := s.checkSpace("build an image", 0); err != nil {
		return Image{}, err
	}
	img, err := s.buildImage(ctx, image.BuildSpec{
		Name: b.Name, Replace: b.Replace, Packages: b.Packages, DiskMiB: b.DiskMiB, Kernel: b.Kernel, Tar: b.Tar,
	}, progress)
	if err != nil {
		return Image{}, err
	}
	return fromImage(img), nil
}

// buildImage builds an image and keeps the log of it.
func (s *Service) buildImage(ctx context.Context, spec image.BuildSpec, progress Progress) (image.Image, error) {
	l, err := s.logs.start(ident.New(ident.Image), spec.Name)
	if err != nil {
		return image.Image{}, err
	}
	spec.Log = lineWriter{l}
	img, err := s.cfg.Images.Build(ctx, spec, image.Progress(l.follow(progress)))
	return img, s.logs.finish(l, img.ID, err)
}

// Images lists the images that are built.
func (s *Service) Images(ctx context.Context) ([]Image, error) {
	all, err := s.cfg.Images.List()
	if err != nil {
		return nil, err
	}
	users, err := s.imageUsers(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]Image, 0, len(all))
	for _, img := range all {
		one := fromImage(img)
		one.UsedBy = users[one.ID]
		out = append(out, one)
	}
	return out, nil
}

// Image returns one image.
func (s *Service) Image(ctx context.Context, ref string) (Image, error) {
	img, err := s.cfg.Images.Get(ref)
	if err != nil {
		return Image{}, err
	}
	users, err := s.imageUsers(ctx)
	if err != nil {
		return Image{}, err
	}
	out := fromImage(img)
	out.UsedBy = users[out.ID]
	return out, nil
}

// RemoveImage deletes an image that no snapshot uses.
func (s *Service) RemoveImage(ctx context.Context, ref string) error {
	img, err := s.Image(ctx, ref)
	if err != nil {
		return err
	}
	if len(img.UsedBy) > 0 {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "image %s is used by snapshots %s", ref, strings.Join(img.UsedBy, ", ")),
			"remove them first with: forkd snapshot rm")
	}
	if err := s.retireImage(img.ID); err != nil {
		return err
	}
	defer s.unretireImage(img.ID)
	if err := s.cfg.Images.Remove(ctx, img.ID); err != nil {
		return err
	}
	s.logs.remove(img.ID)
	return nil
}

// useImage keeps an image from being removed while a snapshot is made from it.
func (s *Service) useImage(id string) (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.building[id] < 0 {
		return nil, errdefs.New(errdefs.ErrNotFound, "image %s is being removed", id)
	}
	s.building[id]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.building[id]--; s.building[id] == 0 {
			delete(s.building, id)
		}
	}, nil
}

// retireImage keeps an image from being used until unretireImage.
func (s *Service) retireImage(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.building[id]; n != 0 {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "image %s is in use: a snapshot is being made from it, or it is being removed", id),
			"try again when that has ended")
	}
	s.building[id] = -1
	return nil
}

func (s *Service) unretireImage(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.building, id)
}

// imageUsers maps image ids to the snapshots made from them.
func (s *Service) imageUsers(context.Context) (map[string][]string, error) {
	users := map[string][]string{}
	for _, m := range s.cfg.Store.List() {
		users[m.Image.ID] = append(users[m.Image.ID], m.ID)
	}
	for _, ids := range users {
		slices.Sort(ids)
	}
	return users, nil
}

func fromImage(img image.Image) Image {
	return Image{
		ID: img.ID, Name: img.Name, CreatedAt: img.CreatedAt, Source: img.Source, Packages: img.Packages,
		DiskMiB: img.DiskMiB, Bytes: img.Bytes, Digest: img.Digest, Kernel: img.KernelRelease, Builtin: img.Builtin,
	}
}
