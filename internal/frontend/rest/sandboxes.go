package rest

import (
	"context"
	"errors"
	"net/http"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/sandbox"
)

// abandonTimeout bounds the clean-up of children whose client went away.
const abandonTimeout = time.Minute

func (s *server) createSandboxes(w http.ResponseWriter, r *http.Request) error {
	var req api.CreateSandboxes
	if err := decode(r, &req); err != nil {
		return err
	}
	f, err := forkOf(req)
	if err != nil {
		return err
	}
	if f.Wait, err = waitOf(r, req.Wait); err != nil {
		return err
	}
	if wantsStream(r) {
		return s.streamFork(w, r, f)
	}
	items, err := s.svc.Fork(r.Context(), f, nil)
	if err != nil {
		return err
	}
	if err := r.Context().Err(); err != nil && !repeatable(w) {
		s.abandon(r, items)
		return err
	}
	answer := make([]any, 0, len(items))
	for _, it := range items {
		if it.Err != nil {
			answer = append(answer, api.ForkFailure{Index: it.Index, Error: body(it.Err)})
			continue
		}
		answer = append(answer, sandboxOf(it.Sandbox))
	}
	respond(w, http.StatusCreated, answer)
	return nil
}

// streamFork answers line by line as children become ready.
func (s *server) streamFork(w http.ResponseWriter, r *http.Request, f sandbox.Fork) error {
	out := &stream{w: w}
	f.Progress = func(step string, fraction float64) {
		out.line(api.ForkLine{Progress: &api.Progress{Step: step, Fraction: fraction}})
	}
	items, err := s.svc.Fork(r.Context(), f, func(it sandbox.ForkItem) { out.line(forkLine(it)) })
	if err != nil && !out.started() {
		return err
	}
	last := api.ForkLine{Done: true, OK: new(int), Failed: new(int)}
	if err != nil {
		b := body(err)
		*last.Failed, last.Error, last.Code, last.Hint = f.N, b.Error, b.Code, b.Hint
		forget(w)
	}
	for _, it := range items {
		if it.Err != nil {
			*last.Failed++
		} else {
			*last.OK++
		}
	}
	if r.Context().Err() != nil && !repeatable(w) {
		s.abandon(r, items)
		return nil
	}
	out.line(last)
	return nil
}

// abandon kills children that came up just when their client went away: nobody
// knows their ids.
func (s *server) abandon(r *http.Request, items []sandbox.ForkItem) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), abandonTimeout)
	defer cancel()
	for _, it := range items {
		if it.Err != nil {
			continue
		}
		if err := s.svc.Kill(ctx, it.Sandbox.ID); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
			s.log.ErrorContext(ctx, "kill sandbox of a client that went away", "sandbox", it.Sandbox.ID, "error", err)
		}
	}
}

// forkOf checks a request and turns it into what the service is asked.
func forkOf(req api.CreateSandboxes) (sandbox.Fork, error) {
	n := max(len(req.Children), 1)
	if req.N != nil {
		n = *req.N
	}
	switch {
	case req.SnapshotTag == "":
		return sandbox.Fork{}, missing("snapshot_tag")
	case len(req.Children) > 0 && n != len(req.Children):
		return sandbox.Fork{}, errdefs.New(errdefs.ErrInvalid, "n is %d, but there are inputs for %d children", n, len(req.Children))
	case n < 1 || n > 1000:
		return sandbox.Fork{}, errdefs.New(errdefs.ErrInvalid, "n is %d, want 1 to 1000", n)
	case req.LiveFork:
		return sandbox.Fork{}, unsupported("live_fork", "leave it out: every sandbox has memory that can be shared")
	case req.Hugepages:
		return sandbox.Fork{}, unsupported("hugepages", "leave it out")
	}
	if err := ident.CheckRef(req.SnapshotTag); err != nil {
		return sandbox.Fork{}, err
	}
	f := sandbox.Fork{
		Snapshot: req.SnapshotTag, N: n, Name: req.Name, Labels: req.Labels, Env: req.Env,
		Partial: req.Partial, Engine: req.Engine, Cold: req.Cold, Secrets: req.Secrets, WithSecrets: req.WithSecrets,
	}
	var err error
	if f.Reseed, err = sandbox.ParseReseed(req.Reseed); err != nil {
		return sandbox.Fork{}, err
	}
	if f.Children, err = childrenOf(req.Children); err != nil {
		return sandbox.Fork{}, err
	}
	f.Shape.CPUs, f.Shape.MemoryMiB, f.Shape.DiskMiB = req.CPUs, req.MemoryMiB, req.DiskMiB
	if err := limitsOf(req, &f); err != nil {
		return sandbox.Fork{}, err
	}
	return f, nil
}

// childrenOf joins the two forms of files.
func childrenOf(list []api.ChildInput) ([]sandbox.ChildInput, error) {
	var out []sandbox.ChildInput
	for i, c := range list {
		in := sandbox.ChildInput{Env: c.Env, Labels: c.Labels}
		if len(c.Files)+len(c.FilesBase64) > 0 {
			in.Files = make(map[string][]byte, len(c.Files)+len(c.FilesBase64))
		}
		for name, text := range c.Files {
			in.Files[name] = []byte(text)
		}
		for name, content := range c.FilesBase64 {
			if _, twice := in.Files[name]; twice {
				return nil, errdefs.New(errdefs.ErrInvalid, "children[%d]: file %.200q is given as text and in base64", i, name)
			}
			in.Files[name] = content
		}
		out = append(out, in)
	}
	return out, nil
}

func unsupported(field, hint string) error {
	return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "%s is not supported", field), "%s", hint)
}

func (s *server) listSandboxes(w http.ResponseWriter, r *http.Request) error {
	list, err := s.svc.Sandboxes(r.Context())
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, convert(list, sandboxOf))
	return nil
}

func (s *server) getSandbox(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	sb, err := s.svc.Sandbox(r.Context(), ref)
	if err != nil {
		return err
	}
	answer := sandboxOf(sb)
	if sb.EndedAt.IsZero() {
		// It may have ended meanwhile, or be just starting: then there is no usage.
		if u, err := s.svc.Usage(r.Context(), sb.ID); err == nil {
			answer.Usage = usageOf(u)
		}
	}
	respond(w, http.StatusOK, answer)
	return nil
}

func (s *server) deleteSandbox(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	if err := s.svc.Kill(r.Context(), ref); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
