package rest

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// Config is what the front end is made of.
type Config struct {
	Service Service
	// Token, if set, is required of every request over TCP but /healthz.
	Token string
	// AllowedHosts are further Host names accepted on loopback without a token.
	AllowedHosts []string
	Log          *slog.Logger // nil discards
	Version      string       // of this build
	Engine       string       // that the daemon runs
	// Closing ends when the daemon is about to: requests that would go on without an
	// end, such as a followed log, end then. Nil means never.
	Closing context.Context
	// Health says why the daemon cannot serve; nil means that it always can.
	Health func(context.Context) error
}

type server struct {
	svc     Service
	access  access
	log     *slog.Logger
	version string
	engine  string
	health  func(context.Context) error
	closing context.Context
	replays *replays
}

// handler answers one request or returns what to answer instead. It must not
// have written anything if it returns an error.
type handler func(w http.ResponseWriter, r *http.Request) error

type route struct {
	method, path string
	handle       handler
	limit        int64 // of the body; 0 means defaultBody
}

// New returns the handler that serves the whole API.
func New(c Config) (http.Handler, error) {
	if c.Service == nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "REST front end without a service")
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Closing == nil {
		c.Closing = context.Background()
	}
	if c.Health == nil {
		c.Health = func(context.Context) error { return nil }
	}
	s := &server{svc: c.Service, access: newAccess(c), log: c.Log, version: c.Version, engine: c.Engine, health: c.Health, closing: c.Closing, replays: newReplays(time.Now)}
	return s.observe(s.guard(s.mux())), nil
}

// routes lists all that is served; openapi.yaml describes the same.
func (s *server) routes() []route {
	return append(append(s.layerRoutes(), s.packRoutes()...), []route{
		{method: "GET", path: "/healthz", handle: s.getHealth},
		{method: "GET", path: "/version", handle: s.getVersion},
		{method: "GET", path: "/v1/openapi.yaml", handle: s.getOpenAPI},
		{method: "GET", path: "/v1/sandboxes", handle: s.listSandboxes},
		{method: "POST", path: "/v1/sandboxes", handle: s.replays.wrap(s.createSandboxes), limit: forkBody},
		{method: "GET", path: "/v1/sandboxes/{ref}", handle: s.getSandbox},
		{method: "DELETE", path: "/v1/sandboxes/{ref}", handle: s.deleteSandbox},
		{method: "POST", path: "/v1/sandboxes/{ref}/exec", handle: s.exec, limit: execBody},
		{method: "POST", path: "/v1/sandboxes/{ref}/eval", handle: s.eval, limit: evalBody},
		{method: "POST", path: "/v1/sandboxes/{ref}/ping", handle: s.ping},
		{method: "POST", path: "/v1/sandboxes/{ref}/branch", handle: s.replays.wrap(s.branch)},
		{method: "GET", path: "/v1/sandboxes/{ref}/checkpoints", handle: s.listCheckpoints},
		{method: "POST", path: "/v1/sandboxes/{ref}/checkpoints", handle: s.replays.wrap(s.createCheckpoint)},
		{method: "POST", path: "/v1/sandboxes/{ref}/rollback", handle: s.replays.wrap(s.rollback)},
		{method: "PUT", path: "/v1/sandboxes/{ref}/auto-checkpoint", handle: s.setAutoCheckpoint},
		{method: "GET", path: "/v1/snapshots", handle: s.listSnapshots},
		{method: "POST", path: "/v1/snapshots", handle: s.replays.wrap(s.createSnapshot), limit: filesBody},
		{method: "GET", path: "/v1/snapshots/{ref}", handle: s.getSnapshot},
		{method: "GET", path: "/v1/snapshots/{ref}/info", handle: s.getSnapshotInfo},
		{method: "DELETE", path: "/v1/snapshots/{ref}", handle: s.deleteSnapshot},
		{method: "PUT", path: "/v1/snapshots/{ref}/pool", handle: s.setPool},
		{method: "GET", path: "/v1/tree", handle: s.getTree},
		{method: "POST", path: "/v1/diff", handle: s.diff},
		{method: "GET", path: "/v1/pools", handle: s.listPools},
		{method: "GET", path: "/v1/stats", handle: s.listStats},
		{method: "GET", path: "/v1/sandboxes/{ref}/stats", handle: s.getStats},
		{method: "GET", path: "/v1/logs/{ref}", handle: s.getLogs},
		{method: "PUT", path: "/v1/tags/{ref}", handle: s.putTag},
		{method: "DELETE", path: "/v1/tags/{ref}", handle: s.deleteTag},
		{method: "GET", path: "/v1/images", handle: s.listImages},
		{method: "POST", path: "/v1/images", handle: s.replays.wrap(s.buildImage), limit: imageBody},
		{method: "GET", path: "/v1/images/{ref}", handle: s.getImage},
		{method: "DELETE", path: "/v1/images/{ref}", handle: s.deleteImage},
		{method: "GET", path: "/v1/kernels", handle: s.listKernels},
		{method: "POST", path: "/v1/kernels", handle: s.addKernel, limit: kernelBody},
		{method: "DELETE", path: "/v1/kernels/{ref}", handle: s.deleteKernel},
	}...)
}

// mux routes by path first and method second, so that a wrong method is a 405
// in our own error form.
func (s *server) mux() http.Handler {
	byPath := map[string]map[string]route{}
	for _, rt := range s.routes() {
		if byPath[rt.path] == nil {
			byPath[rt.path] = map[string]route{}
		}
		byPath[rt.path][rt.method] = rt
	}
	mux := http.NewServeMux()
	for at, methods := range byPath {
		mux.Handle(at, s.dispatch(methods))
	}
	mux.Handle("/healthz/{$}", s.dispatch(byPath["/healthz"]))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fail(w, &httpError{status: http.StatusNotFound, err: errdefs.New(errdefs.ErrNotFound, "there is no route %.200s", r.URL.Path)})
	})
	// The mux would redirect a path like /v1/snapshots/../../etc; say no instead.
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if clean := path.Clean(r.URL.Path); clean != r.URL.Path && clean+"/" != r.URL.Path {
			fail(w, errdefs.New(errdefs.ErrInvalid, "path %.200q has an empty or dotted part where a reference belongs", r.URL.Path))
			return
		}
		mux.ServeHTTP(w, r)
	})
}

func (s *server) dispatch(methods map[string]route) http.Handler {
	var allowed []string
	for _, m := range []string{"GET", "POST", "PUT", "DELETE"} {
		if _, ok := methods[m]; ok {
			allowed = append(allowed, m)
		}
	}
	allow := strings.Join(allowed, ", ")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rt, ok := methods[r.Method]
		if !ok {
			w.Header().Set("Allow", allow)
			fail(w, refuse(http.StatusMethodNotAllowed, "method %.20s is not allowed here, only %s", r.Method, allow))
			return
		}
		limit := rt.limit
		if limit == 0 {
			limit = defaultBody
		}
		r.Body = http.MaxBytesReader(w, r.Body, limit)
		if err := rt.handle(w, r); err != nil {
			s.failed(w, r, err)
		}
	})
}

// failed answers err and logs what the operator should see.
func (s *server) failed(w http.ResponseWriter, r *http.Request, err error) {
	var he *httpError
	// A full host is no fault.
	if !errors.As(err, &he) && !errors.Is(err, errdefs.ErrResourceExhausted) && statusOf(err) >= http.StatusInternalServerError {
		s.log.LogAttrs(r.Context(), slog.LevelError, "request failed", slog.String("id", requestID(r.Context())),
			slog.String("method", r.Method), slog.String("path", r.URL.Path), slog.String("error", err.Error()))
	}
	fail(w, err)
}

func (s *server) getHealth(w http.ResponseWriter, r *http.Request) error {
	if err := s.health(r.Context()); err != nil {
		return errdefs.As(errdefs.ErrUnavailable, err)
	}
	respond(w, http.StatusOK, api.Health{OK: true})
	return nil
}

func (s *server) getVersion(w http.ResponseWriter, _ *http.Request) error {
	respond(w, http.StatusOK, api.Version{Version: s.version, API: "v1", Engine: s.engine})
	return nil
}

func (s *server) getOpenAPI(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = w.Write(api.OpenAPI) // a failed write means that the client is gone
	return nil
}
