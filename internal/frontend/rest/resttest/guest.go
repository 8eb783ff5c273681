package resttest

import (
	"context"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// Exec implements rest.Runner: without OnExec it echoes arguments and input, and
// the program "missing" does not exist.
func (s *Service) Exec(ctx context.Context, ref string, r agentwire.ExecRequest) (agentwire.ExecResult, error) {
	if _, err := s.Sandbox(ctx, ref); err != nil {
		return agentwire.ExecResult{}, err
	}
	if s.OnExec != nil {
		return s.OnExec(ctx, ref, r)
	}
	if r.Argv[0] == "missing" {
		return agentwire.ExecResult{}, errdefs.New(errdefs.ErrNotFound, "exec: there is no program %q", r.Argv[0])
	}
	return agentwire.ExecResult{
		Stdout: fmt.Appendf(nil, "%q %s\n", r.Argv, r.Stdin), Duration: 5 * time.Millisecond, CPU: 2 * time.Millisecond, MaxRSSKiB: 900,
	}, nil
}

// Eval implements rest.Runner: without OnEval the result is the code.
func (s *Service) Eval(ctx context.Context, ref string, r agentwire.EvalRequest) (agentwire.EvalResult, error) {
	if _, err := s.Sandbox(ctx, ref); err != nil {
		return agentwire.EvalResult{}, err
	}
	if s.OnEval != nil {
		return s.OnEval(ctx, ref, r)
	}
	return agentwire.EvalResult{HasResult: true, Result: r.Code, Stdout: []byte("printed\n"), Duration: time.Millisecond}, nil
}

// Ping implements rest.Runner.
func (s *Service) Ping(ctx context.Context, ref string) (agentwire.Pong, error) {
	_, err := s.Sandbox(ctx, ref)
	return agentwire.Pong{
		AgentVersion: "fake", ProtocolVersion: 1, PID: 1, WallClock: Born(), Uptime: time.Second, WarmupReady: true,
		Runners: []string{"python"}, PythonVersion: "3.11.2", NumpyVersion: "1.24.2", Generation: 1,
	}, err
}
