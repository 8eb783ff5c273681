package sandbox

import (
	"context"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// Exec runs a program in a sandbox.
func (s *Service) Exec(ctx context.Context, ref string, req agentwire.ExecRequest) (res agentwire.ExecResult, err error) {
	if err := checkExec(&req); err != nil {
		return res, err
	}
	err = s.withAgent(ctx, ref, func(a Agent) (err error) {
		ctx, cancel := context.WithTimeout(ctx, req.Timeout+callSlack)
		defer cancel()
		res, err = a.Exec(ctx, req)
		return err
	})
	return res, err
}

// callSlack is how much longer than its own time-out a call may take before the
// guest counts as broken. A guest that shares two cores with 50 others is slow.
const callSlack = 30 * time.Second

func checkExec(req *agentwire.ExecRequest) error {
	if len(req.Argv) == 0 || req.Argv[0] == "" {
		return errdefs.New(errdefs.ErrInvalid, "exec: no program given")
	}
	if req.Timeout == 0 {
		req.Timeout = agentwire.DefaultExecTimeout
	}
	return checkCall("exec", req.Timeout, req.OutputLimit)
}

func checkCall(what string, timeout time.Duration, outputLimit int) error {
	if timeout < 0 || timeout > agentwire.MaxExecTimeout {
		return errdefs.New(errdefs.ErrInvalid, "%s: time-out %v is not between 0 and %v", what, timeout, agentwire.MaxExecTimeout)
	}
	if outputLimit < 0 || outputLimit > agentwire.MaxOutputLimit {
		return errdefs.New(errdefs.ErrInvalid, "%s: output limit %d is not between 0 and %d bytes", what, outputLimit, agentwire.MaxOutputLimit)
	}
	return nil
}

// Eval runs code in the warm runner of a sandbox.
func (s *Service) Eval(ctx context.Context, ref string, req agentwire.EvalRequest) (res agentwire.EvalResult, err error) {
	if req.Timeout == 0 {
		req.Timeout = agentwire.DefaultExecTimeout
	}
	if err := checkCall("eval", req.Timeout, req.OutputLimit); err != nil {
		return res, err
	}
	err = s.withAgent(ctx, ref, func(a Agent) (err error) {
		ctx, cancel := context.WithTimeout(ctx, req.Timeout+callSlack)
		defer cancel()
		res, err = a.Eval(ctx, req)
		return err
	})
	return res, err
}

// Ping asks the agent of a sandbox how it is.
func (s *Service) Ping(ctx context.Context, ref string) (pong agentwire.Pong, err error) {
	err = s.withAgent(ctx, ref, func(a Agent) (err error) {
		ctx, cancel := context.WithTimeout(ctx, callSlack)
		defer cancel()
		pong, err = a.Ping(ctx)
		return err
	})
	return pong, err
}

// Usage is what a sandbox consumes on the host.
func (s *Service) Usage(ctx context.Context, ref string) (engine.Usage, error) {
	e, err := s.resolve(ref)
	if err != nil {
		return engine.Usage{}, err
	}
	if !e.snapshot().State.living() {
		return engine.Usage{}, errdefs.New(errdefs.ErrConflict, "sandbox %s has ended: %s", e.snapshot().ID, e.snapshot().Reason)
	}
	u, err := e.machine.Usage(ctx)
	if last := e.lastActivity(); last.After(u.LastActivity) {
		u.LastActivity = last
	}
	return u, err
}

// withAgent runs fn with the agent of a running sandbox.
func (s *Service) withAgent(ctx context.Context, ref string, fn func(Agent) error) error {
	e, err := s.resolve(ref)
	if err != nil {
		return err
	}
	info := e.snapshot()
	switch info.State {
	case Running, Capturing:
	case Failed, Lost:
		return errdefs.New(errdefs.ErrConflict, "sandbox %s has ended: %s", info.ID, info.Reason)
	default:
		return errdefs.New(errdefs.ErrConflict, "sandbox %s is %s, not running", info.ID, info.State)
	}
	if err := standsStill(e); err != nil {
		return err
	}
	e.active()
	err = e.link.call(ctx, fn)
	e.active()
	if err == nil {
		return nil
	}
	if e.rolledBack() {
		return errdefs.New(errdefs.ErrConflict, "sandbox %s was rolled back meanwhile: the call ended with the machine it ran on", info.ID)
	}
	if endedMeanwhile(ctx, e, err) {
		return errdefs.New(errdefs.ErrGuest, "sandbox %s ended meanwhile: %s", info.ID, e.whyEnded())
	}
	if err := standsStill(e); err != nil {
		return err
	}
	return fmt.Errorf("sandbox %s: %w", info.ID, err)
}

// standsStill is an error if the machine of e waits for something of the host.
func standsStill(e *entry) error {
	w, ok := e.machine.(engine.Waiter)
	if !ok || w.Waiting() == "" {
		return nil
	}
	return errdefs.WithHint(errdefs.New(errdefs.ErrResourceExhausted, "sandbox %s stands still: %s", e.snapshot().ID, w.Waiting()),
		"make space on the disk of the data directory: the sandbox goes on by itself")
}

// whyEnded says why the machine of e ended.
func (e *entry) whyEnded() string {
	if reason := e.snapshot().Reason; reason != "" {
		return reason
	}
	return e.machine.Reason()
}

// endedMeanwhile tells whether err comes from the end of the machine.
func endedMeanwhile(ctx context.Context, e *entry, err error) bool {
	patience := time.Duration(0)
	if class := errdefs.Class(err); class == errdefs.ErrGuest || class == errdefs.ErrUnavailable {
		patience = endPatience
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-e.machine.Done():
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return !e.alive()
}
