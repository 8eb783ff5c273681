package forkd

import (
	"context"
	"net/http"

	"forkd.dev/forkd/api/rest"
)

// ForkWatch is told how a fork goes on. Any field may be nil. The functions are
// called one after the other, before Fork returns.
type ForkWatch struct {
	Ready    func(index int, sb Sandbox) // a child is up
	Failed   func(index int, err error)  // a child did not come up
	Progress Progress                    // work that must come first
	// Key, if set, makes the call repeatable: a second call with the same key and
	// request answers what the first did and creates nothing.
	Key string
}

// ForkResult is what a fork made, in the order of the children's indexes.
type ForkResult struct {
	Sandboxes []Sandbox
	Failures  []ForkFailure // only with req.Partial
}

// Fork makes req.N sandboxes of a snapshot. An error means that none is left,
// except an ErrUnavailable in the middle of the answer: then look at Sandboxes.
func (c *Client) Fork(ctx context.Context, req ForkRequest, watch *ForkWatch) (ForkResult, error) {
	if watch == nil {
		watch = &ForkWatch{}
	}
	var up, down = map[int]Sandbox{}, map[int]ForkFailure{}
	top := -1
	err := c.lines(ctx, "/v1/sandboxes", req, watch.Key, func(raw []byte) error {
		var line rest.ForkLine
		if err := decodeLine(raw, &line); err != nil {
			return err
		}
		switch {
		case line.Done:
			if err := streamError(line.Error, line.Code, line.Hint); err != nil {
				return err
			}
			return errStop
		case line.Progress != nil:
			watch.progress(line.Progress)
		case line.Index != nil && line.Sandbox != nil:
			up[*line.Index], top = *line.Sandbox, max(top, *line.Index)
			watch.ready(*line.Index, *line.Sandbox)
		case line.Index != nil:
			f := ForkFailure{Index: *line.Index, Error: rest.Error{Error: line.Error, Code: line.Code, Hint: line.Hint}}
			down[*line.Index], top = f, max(top, *line.Index)
			watch.failed(*line.Index, streamError(line.Error, line.Code, line.Hint))
		}
		return nil
	})
	if err != nil {
		return ForkResult{}, err
	}
	return inOrder(up, down, top), nil
}

func inOrder(up map[int]Sandbox, down map[int]ForkFailure, top int) ForkResult {
	var out ForkResult
	for i := range min(top, 1000) + 1 { // a fork has at most 1000 children
		if sb, ok := up[i]; ok {
			out.Sandboxes = append(out.Sandboxes, sb)
		}
		if f, ok := down[i]; ok {
			out.Failures = append(out.Failures, f)
		}
	}
	return out
}

func (w *ForkWatch) progress(p *rest.Progress) {
	if w.Progress != nil {
		w.Progress(p.Step, p.Fraction)
	}
}

func (w *ForkWatch) ready(index int, sb Sandbox) {
	if w.Ready != nil {
		w.Ready(index, sb)
	}
}

func (w *ForkWatch) failed(index int, err error) {
	if w.Failed != nil {
		w.Failed(index, err)
	}
}

// Sandboxes lists the sandboxes the daemon knows.
func (c *Client) Sandboxes(ctx context.Context) ([]Sandbox, error) {
	return fetch[[]Sandbox](ctx, c, http.MethodGet, "/v1/sandboxes", nil)
}

// Sandbox returns one sandbox, with its Usage if it lives.
func (c *Client) Sandbox(ctx context.Context, ref string) (Sandbox, error) {
	return fetch[Sandbox](ctx, c, http.MethodGet, path("v1", "sandboxes", ref), nil)
}

// Kill ends a sandbox.
func (c *Client) Kill(ctx context.Context, ref string) error {
	return c.do(ctx, http.MethodDelete, path("v1", "sandboxes", ref), nil)
}

// Exec runs a program. That it failed or does not exist (127) is a result.
func (c *Client) Exec(ctx context.Context, ref string, req ExecRequest) (ExecResult, error) {
	return fetch[ExecResult](ctx, c, http.MethodPost, path("v1", "sandboxes", ref, "exec"), req)
}

// Eval runs code in a warm runner. That it raised an error is a result.
func (c *Client) Eval(ctx context.Context, ref string, req EvalRequest) (EvalResult, error) {
	return fetch[EvalResult](ctx, c, http.MethodPost, path("v1", "sandboxes", ref, "eval"), req)
}

// Ping asks a sandbox's agent what it is.
func (c *Client) Ping(ctx context.Context, ref string) (Pong, error) {
	return fetch[Pong](ctx, c, http.MethodPost, path("v1", "sandboxes", ref, "ping"), nil)
}
