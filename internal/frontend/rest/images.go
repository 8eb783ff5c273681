package rest

import (
	"net/http"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
)

func (s *server) buildImage(w http.ResponseWriter, r *http.Request) error {
	var req api.BuildImage
	archive, err := decodeWithFiles(w, r, &req)
	if err != nil {
		return err
	}
	if req.Name == "" {
		return missing("name")
	}
	if err := ident.CheckTag(req.Name); err != nil {
		return err
	}
	if req.DiskMiB < 0 {
		return errdefs.New(errdefs.ErrInvalid, "disk_mib is %d, must not be negative", req.DiskMiB)
	}
	b := sandbox.BuildImage{Name: req.Name, Replace: req.Replace, Packages: req.Packages, DiskMiB: req.DiskMiB, Kernel: req.Kernel, Tar: archive}
	if !wantsStream(r) {
		im, err := s.svc.BuildImage(r.Context(), b, nil)
		if err != nil {
			return err
		}
		respond(w, http.StatusCreated, imageOf(im))
		return nil
	}
	out := &stream{w: w}
	im, err := s.svc.BuildImage(r.Context(), b, func(step string, fraction float64) {
		out.line(api.ImageLine{Progress: &api.Progress{Step: step, Fraction: fraction}})
	})
	last := api.ImageLine{Done: true}
	switch {
	case err != nil && !out.started():
		return err
	case err != nil:
		e := body(err)
		last.Error, last.Code, last.Hint = e.Error, e.Code, e.Hint
		forget(w)
	default:
		info := imageOf(im)
		last.Image = &info
	}
	out.line(last)
	return nil
}

func (s *server) listImages(w http.ResponseWriter, r *http.Request) error {
	list, err := s.svc.Images(r.Context())
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, convert(list, imageOf))
	return nil
}

func (s *server) getImage(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	im, err := s.svc.Image(r.Context(), ref)
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, imageOf(im))
	return nil
}

func (s *server) deleteImage(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	if err := s.svc.RemoveImage(r.Context(), ref); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func imageOf(im sandbox.Image) api.Image {
	return api.Image{
		ID: im.ID, Name: im.Name, CreatedAtUnix: im.CreatedAt.Unix(), Source: im.Source, Packages: orNone(im.Packages),
		DiskMiB: im.DiskMiB, Bytes: im.Bytes, Digest: im.Digest, Kernel: im.Kernel, Builtin: im.Builtin, UsedBy: orNone(im.UsedBy),
	}
}
