package rest

import (
	"context"
	"io"
	"net/http"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
)

// Kernels is the life of guest kernels.
type Kernels interface {
	Kernels(ctx context.Context) ([]sandbox.Kernel, error)
	AddKernel(ctx context.Context, name string, archive io.Reader) (sandbox.Kernel, error)
	RemoveKernel(ctx context.Context, name string) error
}

// Limits of bodies that carry whole systems; the service bounds what is in them.
const (
	kernelBody = 3 << 30
	imageBody  = 1 << 40
)

func (s *server) listKernels(w http.ResponseWriter, r *http.Request) error {
	list, err := s.svc.Kernels(r.Context())
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, convert(list, kernelOf))
	return nil
}

func (s *server) addKernel(w http.ResponseWriter, r *http.Request) error {
	var req api.AddKernel
	archive, err := decodeWithFiles(w, r, &req)
	if err != nil {
		return err
	}
	if archive == nil {
		return errdefs.WithHint(refuse(http.StatusUnsupportedMediaType, "a kernel comes as %s", api.Tar), "see POST /v1/kernels in /v1/openapi.yaml")
	}
	if req.Name == "" {
		return missing("name")
	}
	k, err := s.svc.AddKernel(r.Context(), req.Name, archive)
	if err != nil {
		return err
	}
	respond(w, http.StatusCreated, kernelOf(k))
	return nil
}

func (s *server) deleteKernel(w http.ResponseWriter, r *http.Request) error {
	name := r.PathValue("ref")
	if err := ident.CheckTag(name); err != nil {
		return err
	}
	if err := s.svc.RemoveKernel(r.Context(), name); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func kernelOf(k sandbox.Kernel) api.Kernel {
	return api.Kernel{
		Name: k.Name, Digest: k.Digest, Release: k.Release, Package: k.Package, Modules: k.Modules, Bytes: k.Bytes,
		Default: k.Default, CreatedAtUnix: k.CreatedAt.Unix(), UsedBy: orNone(k.UsedBy),
	}
}
