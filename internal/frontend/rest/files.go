package rest

import (
	"archive/tar"
	"io"
	"math"
	"mime"
	"net/http"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// filesBody bounds a body that carries files; the service bounds their content.
const filesBody = 2 << 30

// tarBlock is what everything in an archive is padded to.
const tarBlock = 512

// decodeWithFiles decodes a request into v: JSON, or a tar archive that starts
// with it. In the second case it returns the rest of the archive, which is still
// to be read from the body.
func decodeWithFiles(w http.ResponseWriter, r *http.Request, v any) (io.Reader, error) {
	media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || media != api.Tar {
		r.Body = http.MaxBytesReader(w, r.Body, defaultBody)
		return nil, decode(r, v)
	}
	if r.Header.Get(api.IdempotencyKey) != "" {
		return nil, unsupported(api.IdempotencyKey+" with files", "send the request without the key")
	}
	// The reader of the archive reads no further than it must.
	archive := tar.NewReader(r.Body)
	h, err := archive.Next()
	if err != nil || h.Name != api.RequestEntry || h.Typeflag != tar.TypeReg {
		return nil, errdefs.New(errdefs.ErrInvalid, "the archive does not start with the entry %s", api.RequestEntry)
	}
	if h.Size > defaultBody {
		return nil, refuse(http.StatusRequestEntityTooLarge, "%s is larger than %d bytes", api.RequestEntry, defaultBody)
	}
	raw, err := io.ReadAll(archive)
	if err != nil {
		return nil, readError(err)
	}
	if err := unmarshal(raw, v); err != nil {
		return nil, err
	}
	if _, err := io.CopyN(io.Discard, r.Body, (tarBlock-h.Size%tarBlock)%tarBlock); err != nil {
		return nil, readError(err)
	}
	// The answer's first lines may go out while the body still comes in. HTTP/2 is
	// always like that and knows no such switch.
	_ = http.NewResponseController(w).EnableFullDuplex()
	return r.Body, nil
}

func startOf(st *api.Start) (*sandbox.Start, error) {
	if st == nil {
		return nil, nil
	}
	if math.IsNaN(st.ReadyTimeout) || st.ReadyTimeout < 0 || st.ReadyTimeout > (24*time.Hour).Seconds() {
		return nil, errdefs.New(errdefs.ErrInvalid, "start.ready_timeout_secs is %g, want 0 to 86400", st.ReadyTimeout)
	}
	return &sandbox.Start{
		Command: st.Command, Ready: st.Ready, ReadyPort: st.ReadyPort, ReadyLog: st.ReadyLog,
		ReadyTimeout: time.Duration(st.ReadyTimeout * float64(time.Second)), Env: st.Env, Cwd: st.Cwd, User: st.User,
	}, nil
}

func recipeOf(r sandbox.Recipe) api.Recipe {
	out := api.Recipe{Image: r.Image, From: r.From, Warm: r.Warm, Exec: r.Exec, AllowHosts: r.AllowHosts, Files: r.Files}
	if st := r.Start; st != nil {
		out.Start = &api.Start{
			Command: st.Command, Ready: st.Ready, ReadyPort: st.ReadyPort, ReadyLog: st.ReadyLog,
			ReadyTimeout: st.ReadyTimeout.Seconds(), Env: st.Env, Cwd: st.Cwd, User: st.User,
		}
	}
	return out
}
