package rest

import (
	"context"
	"net/http"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// Checkpointer takes sandboxes back to where they were.
type Checkpointer interface {
	Checkpoint(ctx context.Context, ref string, c sandbox.Checkpoint) (sandbox.Branched, error)
	Checkpoints(ctx context.Context, ref string) ([]sandbox.Snapshot, error)
	Rollback(ctx context.Context, ref, to string) (sandbox.RolledBack, error)
	ScheduleCheckpoints(ctx context.Context, ref string, a sandbox.AutoCheckpoint) (sandbox.Sandbox, error)
}

// decodeOptional reads a body that may be absent.
func decodeOptional(r *http.Request, v any) error {
	if r.ContentLength == 0 {
		return nil
	}
	return decode(r, v)
}

func (s *server) createCheckpoint(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	var req api.CreateCheckpoint
	if err := decodeOptional(r, &req); err != nil {
		return err
	}
	c := sandbox.Checkpoint{Label: req.Label, Sync: req.Sync, NoFreeze: req.Freeze != nil && !*req.Freeze}
	res, err := s.svc.Checkpoint(r.Context(), ref, c)
	if err != nil {
		return err
	}
	status := http.StatusCreated
	if !req.Sync {
		status = http.StatusAccepted
	}
	respond(w, status, branchAnswer(res, false))
	return nil
}

func (s *server) listCheckpoints(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	list, err := s.svc.Checkpoints(r.Context(), ref)
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, convert(list, snapshotOf))
	return nil
}

func (s *server) rollback(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	var req api.Rollback
	if err := decodeOptional(r, &req); err != nil {
		return err
	}
	res, err := s.svc.Rollback(r.Context(), ref, req.Checkpoint)
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, api.RolledBack{Sandbox: sandboxOf(res.Sandbox), CheckpointID: res.CheckpointID, DurationMS: ms(res.Duration)})
	return nil
}

func (s *server) setAutoCheckpoint(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	var req api.AutoCheckpoint
	if err := decode(r, &req); err != nil {
		return err
	}
	a, err := scheduleOf(req)
	if err != nil {
		return err
	}
	sb, err := s.svc.ScheduleCheckpoints(r.Context(), ref, a)
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, sandboxOf(sb))
	return nil
}

func scheduleOf(req api.AutoCheckpoint) (sandbox.AutoCheckpoint, error) {
	switch req.Every {
	case "":
		return sandbox.AutoCheckpoint{}, missing("every")
	case "off":
		return sandbox.AutoCheckpoint{}, nil
	}
	every, err := time.ParseDuration(req.Every)
	if err != nil || every <= 0 {
		return sandbox.AutoCheckpoint{}, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "every is %.40q, which is no interval", req.Every),
			`write it with a unit, as in "30s" or "5m", or "off"`)
	}
	return sandbox.AutoCheckpoint{Every: every, Keep: req.Keep}, nil
}

func autoOf(a sandbox.AutoCheckpoint) *api.AutoCheckpoint {
	if a.Every == 0 {
		return nil
	}
	return &api.AutoCheckpoint{Every: a.Every.String(), Keep: a.Keep}
}

// checkpointFirst makes the checkpoint that an exec asks for and returns its id.
func (s *server) checkpointFirst(r *http.Request, ref string, req api.Exec) (string, error) {
	if !req.Checkpoint {
		return "", nil
	}
	label := "before " + req.Args[0]
	if len(label) > maxCheckpointLabel {
		label = label[:maxCheckpointLabel]
	}
	res, err := s.svc.Checkpoint(r.Context(), ref, sandbox.Checkpoint{Label: label})
	return res.Snapshot.ID, err
}

// maxCheckpointLabel keeps a label within what a label's value may have.
const maxCheckpointLabel = 80

// withCheckpoint says in err where to go back to.
func withCheckpoint(err error, ref, id string) error {
	if id == "" || errdefs.Hint(err) != "" {
		return err
	}
	return errdefs.WithHint(err, "go back with: forkd rollback %s %s", ref, id)
}
