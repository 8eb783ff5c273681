package forkd

import (
	"context"
	"io"
	"net/http"

	"forkd.dev/forkd/api/rest"
)

// BuildImage builds an image; progress may be nil.
func (c *Client) BuildImage(ctx context.Context, req ImageRequest, progress Progress) (Image, error) {
	return c.buildImage(ctx, req, progress)
}

// BuildImageOf builds an image of a root file system in a tar archive, plain or
// compressed by gzip, zstd or xz. Packages of req must be empty.
func (c *Client) BuildImageOf(ctx context.Context, req ImageRequest, archive io.Reader, progress Progress) (Image, error) {
	head, err := packHead(req)
	if err != nil {
		return Image{}, err
	}
	return c.buildImage(ctx, io.MultiReader(head, archive), progress)
}

// buildImage sends a request, or the archive that carries one.
func (c *Client) buildImage(ctx context.Context, req any, progress Progress) (Image, error) {
	var out Image
	err := c.lines(ctx, "/v1/images", req, "", func(raw []byte) error {
		var line rest.ImageLine
		if err := decodeLine(raw, &line); err != nil {
			return err
		}
		if line.Image != nil {
			out = *line.Image
		}
		return step(line.Progress, progress, line.Done, streamError(line.Error, line.Code, line.Hint))
	})
	return out, err
}

// Images lists all images.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	return fetch[[]Image](ctx, c, http.MethodGet, "/v1/images", nil)
}

// Image returns one image.
func (c *Client) Image(ctx context.Context, ref string) (Image, error) {
	return fetch[Image](ctx, c, http.MethodGet, path("v1", "images", ref), nil)
}

// RemoveImage removes an image that no snapshot uses.
func (c *Client) RemoveImage(ctx context.Context, ref string) error {
	return c.do(ctx, http.MethodDelete, path("v1", "images", ref), nil)
}

// Version returns the daemon's version.
func (c *Client) Version(ctx context.Context) (VersionInfo, error) {
	return fetch[VersionInfo](ctx, c, http.MethodGet, "/version", nil)
}

// Health returns nil if the daemon serves.
func (c *Client) Health(ctx context.Context) error {
	return c.do(ctx, http.MethodGet, "/healthz", nil)
}
