package sandbox

import (
	"context"
	"io"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/image"
)

// Kernels lists the guest kernels, the default one first.
func (s *Service) Kernels(ctx context.Context) ([]Kernel, error) {
	if s.cfg.Kernels == nil {
		return nil, nil
	}
	all, err := s.cfg.Kernels.Kernels(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]Kernel, 0, len(all))
	for _, k := range all {
		out = append(out, fromKernel(k))
	}
	return out, nil
}

// AddKernel stores a kernel out of an archive, see [image.Store.AddKernel].
func (s *Service) AddKernel(ctx context.Context, name string, archive io.Reader) (Kernel, error) {
	if s.cfg.Kernels == nil {
		return Kernel{}, errdefs.New(errdefs.ErrUnsupported, "this daemon keeps no kernels")
	}
	if err := s.checkOpen(); err != nil {
		return Kernel{}, err
	}
	if err := s.checkSpace("add a kernel", 0); err != nil {
		return Kernel{}, err
	}
	k, err := s.cfg.Kernels.AddKernel(ctx, name, archive)
	return fromKernel(k), err
}

// RemoveKernel removes a kernel that no image uses.
func (s *Service) RemoveKernel(ctx context.Context, name string) error {
	if s.cfg.Kernels == nil {
		return errdefs.New(errdefs.ErrNotFound, "there is no kernel %.80q", name)
	}
	return s.cfg.Kernels.RemoveKernel(ctx, name)
}

func fromKernel(k image.NamedKernel) Kernel {
	return Kernel{
		Name: k.Name, Digest: k.Kernel.Digest, Release: k.Kernel.Release, Package: k.Kernel.Package, Modules: len(k.Kernel.Modules),
		Bytes: k.Bytes, Default: k.Default, CreatedAt: k.Kernel.CreatedAt, UsedBy: k.UsedBy,
	}
}
