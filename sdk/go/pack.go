package forkd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// Secrets says what to do about a memory that may hold secrets.
type Secrets bool

// The values of Secrets.
const (
	RefuseSecrets Secrets = false
	WithSecrets   Secrets = true
)

// Pack writes a snapshot with its ancestors, its image and its kernel to w as one
// file. After an error what was written is no pack.
func (c *Client) Pack(ctx context.Context, ref string, secrets Secrets, w io.Writer) error {
	target := path("v1", "snapshots", ref, "pack")
	if secrets {
		target += "?with_secrets=true"
	}
	return c.download(ctx, target, "pack of "+ref, w)
}

// UnpackRequest says what to do with a pack.
type UnpackRequest struct {
	Tag   string // of the snapshot; "" takes the one it had
	Force bool   // move the tag if it is taken
}

// Unpack sends a pack and returns its snapshot once it is verified and ready.
func (c *Client) Unpack(ctx context.Context, r io.Reader, req UnpackRequest) (Snapshot, error) {
	q := url.Values{}
	if req.Tag != "" {
		q.Set("tag", req.Tag)
	}
	if req.Force {
		q.Set("force", "true")
	}
	target := "/v1/packs"
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	from := &origin{r: r}
	hr, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+target, from)
	if err != nil {
		return Snapshot{}, errdefs.New(errdefs.ErrInvalid, "make request: %w", err)
	}
	hr.Header.Set("Content-Type", rest.Zstd)
	if c.token != "" {
		hr.Header.Set("Authorization", "Bearer "+c.token)
	}
	res, err := c.http.Do(hr)
	if err != nil {
		if from.err != nil {
			return Snapshot{}, fmt.Errorf("read pack: %w", from.err)
		}
		return Snapshot{}, c.connectError(ctx, err)
	}
	defer res.Body.Close()
	if res.StatusCode/100 != 2 {
		return Snapshot{}, answerError(res)
	}
	var out Snapshot
	if err := json.NewDecoder(io.LimitReader(res.Body, maxAnswer)).Decode(&out); err != nil {
		return Snapshot{}, errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("read answer of POST /v1/packs: %w", err))
	}
	return out, nil
}

// origin tells a failed read of what is sent from a failed request.
type origin struct {
	r   io.Reader
	err error
}

func (o *origin) Read(p []byte) (int, error) {
	n, err := o.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		o.err = err
	}
	return n, err
}
