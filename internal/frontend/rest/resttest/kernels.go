package resttest

import (
	"context"
	"io"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// Kernels implements rest.Kernels: there is Debian's.
func (s *Service) Kernels(context.Context) ([]sandbox.Kernel, error) {
	return []sandbox.Kernel{{Digest: "d1", Release: "6.1.0-1-cloud-amd64", Package: "linux-image-6.1.0-1-cloud-amd64", Default: true, Modules: 8, CreatedAt: Born()}}, s.Err
}

// AddKernel implements rest.Kernels.
func (s *Service) AddKernel(_ context.Context, name string, archive io.Reader) (sandbox.Kernel, error) {
	n, err := io.Copy(io.Discard, archive)
	if err != nil {
		return sandbox.Kernel{}, err
	}
	return sandbox.Kernel{Name: name, Digest: "d2", Release: "6.9.1-own", Bytes: n, CreatedAt: Born()}, s.Err
}

// RemoveKernel implements rest.Kernels.
func (s *Service) RemoveKernel(_ context.Context, name string) error {
	return errdefs.New(errdefs.ErrNotFound, "there is no kernel %q", name)
}
