package forkd

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// Kernels lists the guest kernels, the default one first.
func (c *Client) Kernels(ctx context.Context) ([]Kernel, error) {
	return fetch[[]Kernel](ctx, c, http.MethodGet, "/v1/kernels", nil)
}

// AddKernel stores the kernel in file, an ELF vmlinux or a bzImage, under a name.
// modules is the directory lib/modules/RELEASE that belongs to it, or "" if it has
// the drivers of a guest built in.
func (c *Client) AddKernel(ctx context.Context, name, file, modules string) (Kernel, error) {
	copies := []Copy{{From: file, To: "/kernel"}}
	if modules != "" {
		copies = append(copies, Copy{From: modules, To: "/modules"})
	}
	for _, one := range copies {
		if err := one.check(); err != nil {
			return Kernel{}, err
		}
	}
	var out Kernel
	err := streamed(rest.AddKernel{Name: name}, copies, func(body io.Reader) (err error) {
		out, err = fetch[Kernel](ctx, c, http.MethodPost, "/v1/kernels", body)
		return err
	})
	return out, err
}

// RemoveKernel removes a kernel that no image uses.
func (c *Client) RemoveKernel(ctx context.Context, name string) error {
	return c.do(ctx, http.MethodDelete, path("v1", "kernels", name), nil)
}

// packHead is the part of an archive that holds only the request.
func packHead(req any) (io.Reader, error) {
	raw, err := json.Marshal(req)
	if err != nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "encode request: %w", err)
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: rest.RequestEntry, Mode: 0o600, Size: int64(len(raw))}); err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	if _, err := w.Write(raw); err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	if err := w.Flush(); err != nil { // the padding, and no end mark
		return nil, fmt.Errorf("encode request: %w", err)
	}
	return &buf, nil
}
