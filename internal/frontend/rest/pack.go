package rest

import (
	"context"
	"errors"
	"io"
	"math"
	"mime"
	"net/http"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
)

// Packer moves snapshots in and out as one file. progress may be nil.
type Packer interface {
	// Pack writes nothing before it knows that it can.
	Pack(ctx context.Context, p sandbox.Pack, w io.Writer, progress sandbox.Progress) error
	Unpack(ctx context.Context, r io.Reader, u sandbox.Unpack, progress sandbox.Progress) (sandbox.Snapshot, error)
}

// packRoutes lists the routes of Packer. The size of a pack is limited by the disk.
func (s *server) packRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/snapshots/{ref}/pack", handle: s.getPack},
		{method: "POST", path: "/v1/packs", handle: s.postPack, limit: math.MaxInt64},
	}
}

// getPack sends a pack piece by piece.
func (s *server) getPack(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	p := sandbox.Pack{Snapshot: ref, Writer: s.version}
	if p.WithSecrets, err = flag(r, "with_secrets"); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(s.closing, cancel)()
	out := &download{w: w}
	err = s.svc.Pack(ctx, p, out, nil)
	switch {
	case err == nil:
		return nil
	case !out.begun:
		return err
	case r.Context().Err() == nil:
		s.log.WarnContext(r.Context(), "a pack was cut short", "of", ref, "error", err)
	}
	panic(http.ErrAbortHandler) // the only sign left
}

// download sends bytes as they come.
type download struct {
	w     http.ResponseWriter
	begun bool
}

func (d *download) Write(p []byte) (int, error) {
	if !d.begun {
		d.begun = true
		d.w.Header().Set("Content-Type", api.Zstd)
		d.w.Header().Set("X-Content-Type-Options", "nosniff")
		d.w.WriteHeader(http.StatusOK)
	}
	control := http.NewResponseController(d.w)
	_ = control.SetWriteDeadline(time.Now().Add(lineDeadline))
	n, err := d.w.Write(p)
	_ = control.SetWriteDeadline(time.Time{}) // the connection serves other requests later
	return n, err
}

// postPack reads a pack.
func (s *server) postPack(w http.ResponseWriter, r *http.Request) error {
	media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || media != api.Zstd {
		return errdefs.WithHint(refuse(http.StatusUnsupportedMediaType, "Content-Type is %.80q, want %s", r.Header.Get("Content-Type"), api.Zstd),
			"send the header Content-Type: %s", api.Zstd)
	}
	u := sandbox.Unpack{Tag: r.URL.Query().Get("tag")}
	if u.Force, err = flag(r, "force"); err != nil {
		return err
	}
	if u.Tag != "" {
		if err := ident.CheckTag(u.Tag); err != nil {
			return err
		}
	}
	sn, err := s.svc.Unpack(r.Context(), r.Body, u, nil)
	if err != nil {
		s.swallow(w, r)
		if errors.Is(err, errdefs.ErrCorrupt) { // what is damaged is the client's
			return &httpError{status: http.StatusBadRequest, err: err}
		}
		return err
	}
	respond(w, http.StatusCreated, snapshotOf(sn))
	return nil
}

// swallowTime bounds the reading of a body that nobody wants any more.
const swallowTime = 30 * time.Second

// swallow reads what is left of a body: a client that is still sending may otherwise
// never see the answer.
func (s *server) swallow(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Now().Add(swallowTime)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return
	}
	_, _ = io.Copy(io.Discard, r.Body) // what it says makes no difference
	_ = control.SetReadDeadline(time.Time{})
}
