package rest

import (
	"errors"
	"net/http"
	"strings"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// exitNoProgram is what a shell answers for a program that does not exist.
const exitNoProgram = 127

func (s *server) exec(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	var req api.Exec
	if err := decode(r, &req); err != nil {
		return err
	}
	call, err := execOf(req)
	if err != nil {
		return err
	}
	checkpoint, err := s.checkpointFirst(r, ref, req)
	if err != nil {
		return err
	}
	res, err := s.svc.Exec(r.Context(), ref, call)
	if errors.Is(err, errdefs.ErrNotFound) && s.runs(r, ref) {
		// The sandbox is there, so the program is not: the guest's answer, as a shell
		// would give it.
		res, err = agentwire.ExecResult{ExitCode: exitNoProgram, Stderr: []byte(err.Error() + "\n")}, nil
	}
	if err != nil {
		return withCheckpoint(err, ref, checkpoint)
	}
	answer := execResultOf(res)
	answer.CheckpointID = checkpoint
	respond(w, http.StatusOK, answer)
	return nil
}

// runs tells whether ref is a sandbox that can be asked.
func (s *server) runs(r *http.Request, ref string) bool {
	sb, err := s.svc.Sandbox(r.Context(), ref)
	return err == nil && (sb.State == sandbox.Running || sb.State == sandbox.Capturing)
}

func execOf(req api.Exec) (agentwire.ExecRequest, error) {
	var zero agentwire.ExecRequest
	if len(req.Args) == 0 {
		return zero, errdefs.New(errdefs.ErrInvalid, "args is empty: there is no program to run")
	}
	for i, a := range req.Args {
		if strings.Contains(a, "\x00") {
			return zero, errdefs.New(errdefs.ErrInvalid, "args[%d] holds a NUL", i)
		}
	}
	if req.Args[0] == "" {
		return zero, errdefs.New(errdefs.ErrInvalid, "args[0], the program, is empty")
	}
	if strings.Contains(req.Cwd, "\x00") || strings.Contains(req.User, "\x00") {
		return zero, errdefs.New(errdefs.ErrInvalid, "cwd or user holds a NUL")
	}
	if req.Stdin != nil && req.StdinBase64 != nil {
		return zero, errdefs.New(errdefs.ErrInvalid, "stdin and stdin_base64 are both given")
	}
	limit, err := timeout(req.TimeoutSecs)
	if err != nil {
		return zero, err
	}
	if err := errors.Join(checkEnv(req.Env), outputLimit(req.OutputLimit)); err != nil {
		return zero, err
	}
	stdin := req.StdinBase64
	if req.Stdin != nil {
		stdin = []byte(*req.Stdin)
	}
	return agentwire.ExecRequest{
		Argv: req.Args, Env: req.Env, Cwd: req.Cwd, User: req.User,
		Stdin: stdin, Timeout: limit, OutputLimit: req.OutputLimit,
	}, nil
}

func (s *server) eval(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	// A pointer tells an absent code from an empty one, which is valid.
	req := struct {
		api.Eval
		Code *string `json:"code"`
	}{}
	if err := decode(r, &req); err != nil {
		return err
	}
	if req.Code == nil {
		return missing("code")
	}
	limit, err := timeout(req.TimeoutSecs)
	if err != nil {
		return err
	}
	if err := outputLimit(req.OutputLimit); err != nil {
		return err
	}
	res, err := s.svc.Eval(r.Context(), ref, agentwire.EvalRequest{
		Language: req.Language, Code: *req.Code, Timeout: limit, OutputLimit: req.OutputLimit,
	})
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, evalResultOf(res))
	return nil
}

func (s *server) ping(w http.ResponseWriter, r *http.Request) error {
	ref, err := reference(r)
	if err != nil {
		return err
	}
	p, err := s.svc.Ping(r.Context(), ref)
	if err != nil {
		return err
	}
	respond(w, http.StatusOK, pongOf(p))
	return nil
}
