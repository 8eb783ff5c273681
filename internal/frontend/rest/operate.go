package rest

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// Operator is what an operator asks for.
type Operator interface {
	SetWarmPool(ctx context.Context, ref string, n int) (sandbox.WarmPool, error)
	SetBlankPool(ctx context.Context, ref string, n int) (sandbox.WarmPool, error)
	WarmPools(ctx context.Context) ([]sandbox.WarmPool, error)
	Stats(ctx context.Context) ([]sandbox.Stat, error)
	// Logs hands a log to write piece by piece and ends with the log, with ctx, or
	// when write fails. An error before the first piece means that nothing was sent.
	Logs(ctx context.Context, req sandbox.LogRequest, write func([]byte) error) error
}

func (s *server) setPool(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	var req api.SetPool
	if err := decode(r, &req); err != nil {
		return err
	}
	if req.Warm == nil && req.Blank == nil {
		return missing("warm")
	}
	var p sandbox.WarmPool
	if req.Blank != nil {
		p, err = s.svc.SetBlankPool(r.Context(), ref, *req.Blank)
	}
	if err == nil && req.Warm != nil {
		p, err = s.svc.SetWarmPool(r.Context(), ref, *req.Warm)
	}
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, poolOf(p))
	return nil
}

func (s *server) listPools(w http.ResponseWriter, r *http.Request) error {
	list, err := s.svc.WarmPools(r.Context())
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, convert(list, poolOf))
	return nil
}

func poolOf(p sandbox.WarmPool) api.Pool {
	return api.Pool{SnapshotID: p.SnapshotID, Tags: orNone(p.Tags), Warm: p.Want, Ready: p.Ready, Reason: p.Reason, Blank: p.Blank, BlankReady: p.BlankReady}
}

func (s *server) listStats(w http.ResponseWriter, r *http.Request) error {
	list, err := s.svc.Stats(r.Context())
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, convert(list, statOf))
	return nil
}

func (s *server) getStats(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	sb, err := s.svc.Sandbox(r.Context(), ref)
	if err != nil {
		return err
	}
	u, err := s.svc.Usage(r.Context(), sb.ID)
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, statOf(sandbox.Stat{Sandbox: sb, Usage: u}))
	return nil
}

func statOf(st sandbox.Stat) api.Stat {
	sb := st.Sandbox
	return api.Stat{
		ID: sb.ID, Name: sb.Name, SnapshotTag: cmp.Or(sb.SnapshotTag, sb.SnapshotID), State: string(sb.State),
		CreatedAtUnix: sb.CreatedAt.Unix(), Usage: *usageOf(st.Usage),
	}
}

// getLogs answers with a log as text, piece by piece.
func (s *server) getLogs(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	req := sandbox.LogRequest{Ref: ref, Kind: sandbox.LogKind(r.URL.Query().Get("kind"))}
	if req.Follow, err = flag(r, "follow"); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(s.closing, cancel)()
	control := http.NewResponseController(w)
	begun := false
	begin := func() {
		begun = true
		w.Header().Set("Content-Type", api.Text)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.WriteHeader(http.StatusOK)
	}
	err = s.svc.Logs(ctx, req, func(b []byte) error {
		if !begun {
			begin()
		}
		_ = control.SetWriteDeadline(time.Now().Add(lineDeadline))
		_, err := w.Write(b)
		_ = control.Flush()
		// The connection serves other requests later.
		_ = control.SetWriteDeadline(time.Time{})
		return err
	})
	switch {
	case s.closing.Err() != nil && !begun && errors.Is(err, context.Canceled):
		return errdefs.New(errdefs.ErrUnavailable, "the daemon is shutting down")
	case err == nil && !begun:
		begin()
	case err != nil && !begun:
		return err
	case err != nil && !errors.Is(err, context.Canceled):
		s.log.WarnContext(r.Context(), "a log was cut short", "of", ref, "error", err)
		panic(http.ErrAbortHandler) // the only sign left
	}
	return nil
}

// waitOf reads how long a fork may wait for room: the field wait, or the query.
func waitOf(r *http.Request, field string) (time.Duration, error) {
	text := cmp.Or(r.URL.Query().Get("wait"), field)
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "wait is %.40q, which is no duration", text), "write it with a unit, as in 30s or 2m")
	}
	if d < 0 || d > sandbox.MaxWait {
		return 0, errdefs.New(errdefs.ErrInvalid, "wait is %v, want 0 to %v", d, sandbox.MaxWait)
	}
	return d, nil
}

// maxCPULimit is more than any host has; the service knows better.
const maxCPULimit = 1 << 16

// limitsOf checks the limits of a request and sets them in f.
func limitsOf(req api.CreateSandboxes, f *sandbox.Fork) error {
	switch {
	case req.MemoryLimitMiB != nil && *req.MemoryLimitMiB <= 0:
		return errdefs.New(errdefs.ErrInvalid, "memory_limit_mib is %d, want more than 0", *req.MemoryLimitMiB)
	case req.CPULimit != nil && !(*req.CPULimit >= 0.01 && *req.CPULimit <= maxCPULimit):
		return errdefs.New(errdefs.ErrInvalid, "cpu_limit is %g processors, want 0.01 or more", *req.CPULimit)
	case req.PIDsLimit != nil && *req.PIDsLimit <= 0:
		return errdefs.New(errdefs.ErrInvalid, "pids_limit is %d, want more than 0", *req.PIDsLimit)
	}
	if req.MemoryLimitMiB != nil {
		f.MemoryLimitMiB = *req.MemoryLimitMiB
	}
	if req.CPULimit != nil {
		f.CPULimitPercent = int(*req.CPULimit*100 + 0.5)
	}
	if req.PIDsLimit != nil {
		f.PIDsLimit = *req.PIDsLimit
	}
	return nil
}

// cpuLimit turns a limit in percent of a processor into processors.
func cpuLimit(percent int) *float64 {
	if percent <= 0 {
		return nil
	}
	processors := float64(percent) / 100
	return &processors
}
