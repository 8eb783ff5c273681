package guest

import (
	"context"
	"fmt"
	"strings"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// message decodes a reply.
type message interface{ Decode(b []byte) error }

func decode(name string, b []byte, m message) error {
	if err := m.Decode(b); err != nil {
		return errdefs.New(errdefs.ErrGuest, "%s in guest: reply: %s", name, err)
	}
	return nil
}

// Boot gives a freshly booted agent its settings, once, before anything else.
func (c *Client) Boot(ctx context.Context, m agentwire.BootConfig) error {
	if m.HostTime.IsZero() {
		m.HostTime = c.opts.Now()
	}
	_, err := c.do(ctx, "boot", agentwire.MethodBoot, m.Append(nil), smallReply)
	return err
}

// Ping asks the agent how it is.
func (c *Client) Ping(ctx context.Context) (agentwire.Pong, error) {
	var p agentwire.Pong
	b, err := c.do(ctx, "ping", agentwire.MethodPing, nil, smallReply)
	if err != nil {
		return p, err
	}
	if err := decode("ping", b, &p); err != nil {
		return agentwire.Pong{}, err
	}
	for _, s := range []*string{&p.AgentVersion, &p.PythonVersion, &p.NumpyVersion} {
		*s = clean(*s, 200)
	}
	if len(p.Runners) > 16 {
		p.Runners = p.Runners[:16]
	}
	return p, nil
}

// Exec runs a program to its end. A program that cannot be started is an error
// (ErrNotFound if it does not exist); any end of a started one is a result.
func (c *Client) Exec(ctx context.Context, m agentwire.ExecRequest) (agentwire.ExecResult, error) {
	var res agentwire.ExecResult
	limit, err := outputLimit(m.OutputLimit)
	if err != nil {
		return res, err
	}
	b, err := c.do(ctx, "exec", agentwire.MethodExec, m.Append(nil), 2*limit+smallReply)
	if err != nil {
		return res, err
	}
	if err := decode("exec", b, &res); err != nil {
		return agentwire.ExecResult{}, err
	}
	if len(res.Stdout) > limit || len(res.Stderr) > limit || res.ExitCode < 0 || res.ExitCode > 255 {
		return agentwire.ExecResult{}, errdefs.New(errdefs.ErrGuest, "exec in guest: result out of bounds")
	}
	return res, nil
}

// Eval evaluates code in a warm runner. An error raised by the code is a result.
func (c *Client) Eval(ctx context.Context, m agentwire.EvalRequest) (agentwire.EvalResult, error) {
	limit, err := outputLimit(m.OutputLimit)
	if err != nil {
		return agentwire.EvalResult{}, err
	}
	return c.evaluate(ctx, "eval", agentwire.MethodEval, m.Append(nil), limit)
}

// WarmStart starts the runner of a language and runs code in it; after a restart
// of the runner the code runs again. It returns the outcome of the code.
func (c *Client) WarmStart(ctx context.Context, language, code string) (agentwire.EvalResult, error) {
	m := agentwire.WarmStart{Language: language, Code: code}
	return c.evaluate(ctx, "warm start", agentwire.MethodWarmStart, m.Append(nil), agentwire.DefaultOutputLimit)
}

func (c *Client) evaluate(ctx context.Context, name string, method agentwire.Method, body []byte, limit int) (agentwire.EvalResult, error) {
	var res agentwire.EvalResult
	b, err := c.do(ctx, name, method, body, 3*limit+4*smallReply)
	if err != nil {
		return res, err
	}
	if err := decode(name, b, &res); err != nil {
		return agentwire.EvalResult{}, err
	}
	if len(res.Stdout) > limit || len(res.Stderr) > limit || len(res.Result) > limit {
		return agentwire.EvalResult{}, errdefs.New(errdefs.ErrGuest, "%s in guest: result out of bounds", name)
	}
	res.Result = strings.ToValidUTF8(res.Result, "\uFFFD")
	res.Error = clean(res.Error, smallReply)
	res.Traceback = clean(res.Traceback, 2*smallReply)
	return res, nil
}

// clean bounds a text of the guest and makes it valid UTF-8.
func clean(s string, limit int) string {
	if len(s) > limit {
		s = s[:limit]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func outputLimit(n int) (int, error) {
	switch {
	case n == 0:
		return agentwire.DefaultOutputLimit, nil
	case n < 0 || n > agentwire.MaxOutputLimit:
		return 0, errdefs.New(errdefs.ErrInvalid, "output limit %d is not within 0 and %d bytes", n, agentwire.MaxOutputLimit)
	}
	return n, nil
}

// Interrupt raises KeyboardInterrupt (or its like) in a running eval, if any.
func (c *Client) Interrupt(ctx context.Context, language string) error {
	m := agentwire.WarmStart{Language: language}
	_, err := c.do(ctx, "interrupt", agentwire.MethodInterrupt, m.Append(nil), smallReply)
	return err
}

// Prepare freezes user processes for a capture. If no Commit follows within 30 s
// the guest thaws by itself. A verdict undoes it at any time.
func (c *Client) Prepare(ctx context.Context, m agentwire.Prepare) error {
	_, err := c.do(ctx, "prepare capture", agentwire.MethodPrepare, m.Append(nil), smallReply)
	return err
}

// Commit is the last call before the machine is stopped: from here on the guest
// waits for a verdict, however long it takes.
func (c *Client) Commit(ctx context.Context) error {
	_, err := c.do(ctx, "commit capture", agentwire.MethodCommit, nil, smallReply)
	return err
}

// Shutdown ends all programs and powers the guest off.
func (c *Client) Shutdown(ctx context.Context) error {
	_, err := c.do(ctx, "shutdown", agentwire.MethodShutdown, nil, smallReply)
	return err
}

// wrap names the call an error came from.
func wrap(name string, err error) error { return fmt.Errorf("%s in guest: %w", name, err) }
