package agent

import (
	"context"
	"os"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// request decodes the body of a call.
type request interface{ Decode(b []byte) error }

func decode(c *call, m request) error {
	if err := m.Decode(c.body); err != nil {
		return errdefs.As(errdefs.ErrInvalid, err)
	}
	return nil
}

// answer does what a call asks for.
func (a *Agent) answer(ctx context.Context, c *call) (answer, error) {
	switch c.method {
	case agentwire.MethodPing:
		return a.ping(ctx), nil
	case agentwire.MethodBoot:
		var m agentwire.BootConfig
		if err := decode(c, &m); err != nil {
			return answer{}, err
		}
		return answer{}, a.identity.boot(m)
	case agentwire.MethodExec:
		var m agentwire.ExecRequest
		if err := decode(c, &m); err != nil {
			return answer{}, err
		}
		return a.exec(ctx, m)
	case agentwire.MethodEval, agentwire.MethodWarmStart, agentwire.MethodInterrupt:
		return a.runnerCall(ctx, c)
	case agentwire.MethodShutdown:
		return a.shutdown(), nil
	}
	return a.captureCall(ctx, c)
}

func (a *Agent) runnerCall(ctx context.Context, c *call) (answer, error) {
	if c.method == agentwire.MethodEval {
		var m agentwire.EvalRequest
		if err := decode(c, &m); err != nil {
			return answer{}, err
		}
		if err := checkLanguage(m.Language); err != nil {
			return answer{}, err
		}
		return a.python.eval(ctx, m)
	}
	var m agentwire.WarmStart
	if err := decode(c, &m); err != nil {
		return answer{}, err
	}
	if err := checkLanguage(m.Language); err != nil {
		return answer{}, err
	}
	if c.method == agentwire.MethodInterrupt {
		return answer{}, a.python.interrupt()
	}
	return a.python.warmStart(ctx, m)
}

func checkLanguage(name string) error {
	if name != "" && name != languagePython {
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "no runner for language %.40q", name), "the agent has a runner for python")
	}
	return nil
}

// captureCall answers the methods of capture and fork.
func (a *Agent) captureCall(ctx context.Context, c *call) (answer, error) {
	switch c.method {
	case agentwire.MethodPrepare:
		var m agentwire.Prepare
		if err := decode(c, &m); err != nil {
			return answer{}, err
		}
		return answer{}, a.capture.prepare(ctx, m)
	case agentwire.MethodCommit:
		return answer{}, a.capture.commit()
	case agentwire.MethodVerdictSource, agentwire.MethodClock:
		var m agentwire.Clock
		if err := decode(c, &m); err != nil {
			return answer{}, err
		}
		if err := a.identity.setClock(m.Wall); err != nil {
			return answer{}, err
		}
		if c.method == agentwire.MethodVerdictSource {
			if err := a.capture.release(); err != nil {
				return answer{}, err
			}
		}
		now := agentwire.Clock{Wall: a.identity.now()}
		return oneBody(now.Append(nil)), nil
	case agentwire.MethodVerdictFork:
		var m agentwire.Identity
		if err := decode(c, &m); err != nil {
			return answer{}, err
		}
		receipt, err := a.capture.become(ctx, c, m)
		if err != nil {
			return answer{}, err
		}
		return oneBody(receipt.Append(nil)), nil
	}
	return answer{}, errdefs.New(errdefs.ErrUnsupported, "unknown method %d", c.method)
}

func (a *Agent) ping(ctx context.Context) answer {
	p := agentwire.Pong{
		AgentVersion: a.cfg.Version, ProtocolVersion: agentwire.Version, PID: os.Getpid(),
		WallClock: a.identity.now(), Uptime: time.Since(a.started), Generation: a.identity.generationNow(),
	}
	a.python.describe(ctx, &p)
	return oneBody(p.Append(nil))
}

func (a *Agent) shutdown() answer {
	return answer{after: a.stop}
}
