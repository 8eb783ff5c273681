package fake

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// conn is what DialAgent returns: a pipe nobody reads, which knows its machine.
type conn struct {
	net.Conn
	far  net.Conn
	p    *process
	once sync.Once
	done chan struct{}
}

func newConn(p *process) *conn {
	near, far := net.Pipe()
	return &conn{Conn: near, far: far, p: p, done: make(chan struct{})}
}

// Close ends the connection. It may be repeated.
func (c *conn) Close() error {
	c.once.Do(func() {
		close(c.done)
		_ = c.Conn.Close()
		_ = c.far.Close()
	})
	return nil
}

// Agent is a connection to the agent of a fake guest. It has the methods of the
// real client, without the wire.
type Agent struct{ c *conn }

// Connect says hello on a connection of a fake machine. It owns nc, also on error.
func Connect(ctx context.Context, nc net.Conn) (*Agent, error) {
	c, ok := nc.(*conn)
	if !ok {
		_ = nc.Close()
		return nil, errdefs.New(errdefs.ErrInvalid, "connect to agent: %T is no connection of a fake machine", nc)
	}
	a := &Agent{c: c}
	err := a.call(ctx, "hello", anytime, func(*content) error { return nil })
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return a, nil
}

func (a *Agent) closed() bool {
	select {
	case <-a.c.done:
		return true
	default:
		return false
	}
}

// Close ends the connection.
func (a *Agent) Close() error { return a.c.Close() }

// needs says what a call waits for.
type needs int

const (
	anytime needs = iota // the guest runs
	thawed               // and its user processes are not frozen
)

// call runs fn on the guest's content, once the guest is able to.
func (a *Agent) call(ctx context.Context, name string, n needs, fn func(*content) error) error {
	p := a.c.p
	if err := a.hold(ctx, name); err != nil {
		return err
	}
	for {
		p.mu.Lock()
		switch {
		case p.ended:
			defer p.mu.Unlock()
			return errdefs.New(errdefs.ErrGuest, "agent %s: the machine has ended: %s", name, p.reason)
		case p.conn != a.c || a.closed():
			p.mu.Unlock()
			return errdefs.New(errdefs.ErrUnavailable, "agent %s: the connection is closed", name)
		case p.running && (n == anytime || !p.content.Device.Frozen):
			if p.calls++; p.calls == p.faults.DieAfter {
				p.mu.Unlock()
				p.end("the guest ended: scripted")
				return errdefs.New(errdefs.ErrGuest, "agent %s: the machine has ended", name)
			}
			defer p.mu.Unlock()
			defer p.wakeLocked()
			return fn(&p.content)
		}
		changed := p.changed
		p.mu.Unlock()
		select {
		case <-changed:
		case <-a.c.done:
			return errdefs.New(errdefs.ErrUnavailable, "agent %s: the connection is closed", name)
		case <-ctx.Done():
			return fmt.Errorf("agent %s: %w", name, ctx.Err())
		}
	}
}

// hold makes a call wait as scripted.
func (a *Agent) hold(ctx context.Context, name string) error {
	f := a.c.p.faults
	var gate <-chan struct{}
	hang := name == "hello" && f.HangHello
	if f.Hold != nil {
		gate = f.Hold(name)
	}
	if gate == nil && !hang {
		return ctx.Err()
	}
	select {
	case <-gate: // never, if it is nil
		return nil
	case <-a.c.done:
		return errdefs.New(errdefs.ErrUnavailable, "agent %s: the connection is closed", name)
	case <-a.c.p.done:
		return errdefs.New(errdefs.ErrGuest, "agent %s: the machine has ended", name)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Boot configures a freshly booted guest.
func (a *Agent) Boot(ctx context.Context, cfg agentwire.BootConfig) error {
	return a.call(ctx, "boot", anytime, func(c *content) error {
		if c.Device.Booted {
			return errdefs.New(errdefs.ErrConflict, "agent boot: done already")
		}
		c.Device.Booted, c.Device.Hostname, c.Device.offset = true, cfg.Hostname, time.Until(cfg.HostTime)
		return nil
	})
}

// Ping answers at any time the guest runs.
func (a *Agent) Ping(ctx context.Context) (pong agentwire.Pong, err error) {
	err = a.call(ctx, "ping", anytime, func(c *content) error {
		pong = agentwire.Pong{
			AgentVersion: "fake", ProtocolVersion: agentwire.Version, PID: 1, WallClock: time.Now().Add(c.Device.offset),
			Uptime: time.Since(c.Device.BootedAt), WarmupReady: len(c.Device.Runners) > 0,
			Runners: append([]string(nil), c.Device.Runners...), Generation: c.Device.Gen,
		}
		return nil
	})
	return pong, err
}

// Exec runs one of: echo WORDS, hostname, cat FILE, write FILE WORDS, exit N, die,
// getenv NAME, seed.
// /bin/sh -c TEXT runs the words of TEXT.
func (a *Agent) Exec(ctx context.Context, req agentwire.ExecRequest) (res agentwire.ExecResult, err error) {
	argv := req.Argv
	if len(argv) == 3 && argv[0] == "/bin/sh" && argv[1] == "-c" {
		argv = strings.Fields(argv[2])
	}
	if len(argv) == 0 {
		return res, errdefs.New(errdefs.ErrInvalid, "agent exec: no program given")
	}
	if argv[0] == "die" {
		a.c.p.end("the guest ended: shutdown")
	}
	err = a.call(ctx, "exec", thawed, func(c *content) error {
		res = execute(c, argv)
		return nil
	})
	return res, err
}

func execute(c *content, argv []string) agentwire.ExecResult {
	rest := strings.Join(argv[1:], " ")
	switch {
	case argv[0] == "echo":
		return agentwire.ExecResult{Stdout: []byte(rest + "\n")}
	case argv[0] == "hostname":
		return agentwire.ExecResult{Stdout: []byte(c.Device.Hostname + "\n")}
	case argv[0] == "seed":
		return agentwire.ExecResult{Stdout: []byte(c.Device.Seed)}
	case argv[0] == "getenv" && len(argv) == 2:
		if v, ok := c.Device.Secrets[argv[1]]; ok {
			return agentwire.ExecResult{Stdout: []byte(v)}
		}
		return agentwire.ExecResult{Stdout: []byte(c.Device.Env[argv[1]])}
	case argv[0] == "exit" && len(argv) == 2:
		n, _ := strconv.Atoi(argv[1])
		return agentwire.ExecResult{ExitCode: n, Stderr: []byte("exit " + argv[1] + "\n")}
	case argv[0] == "write" && len(argv) > 2:
		c.Disk[argv[1]] = strings.Join(argv[2:], " ")
		return agentwire.ExecResult{}
	case argv[0] == "cat" && len(argv) == 2:
		text, ok := c.Disk[argv[1]]
		if !ok {
			return agentwire.ExecResult{ExitCode: 1, Stderr: []byte("cat: " + argv[1] + ": No such file or directory\n")}
		}
		return agentwire.ExecResult{Stdout: []byte(text)}
	}
	return agentwire.ExecResult{ExitCode: 127, Stderr: []byte(argv[0] + ": not found\n")}
}

// Eval runs "NAME=VALUE" (sets a variable of the long-living program) or "NAME"
// (gives it).
func (a *Agent) Eval(ctx context.Context, req agentwire.EvalRequest) (res agentwire.EvalResult, err error) {
	err = a.call(ctx, "eval", thawed, func(c *content) error {
		res = evaluate(c, req.Code, units(a.c.p.shape))
		return nil
	})
	return res, err
}

func evaluate(c *content, code string, pages uint64) agentwire.EvalResult {
	name, value, assign := strings.Cut(code, "=")
	if assign {
		if err := c.set(name, value, pages); err != nil {
			return agentwire.EvalResult{Error: "MemoryError: " + err.Error()}
		}
		return agentwire.EvalResult{}
	}
	got, ok := c.Memory[name]
	if !ok {
		return agentwire.EvalResult{Error: "NameError: name '" + name + "' is not defined"}
	}
	return agentwire.EvalResult{HasResult: true, Result: got.Value}
}

// WarmStart starts the Python runner and evaluates each line of code in it that
// is an assignment. A line that starts with "raise " raises.
func (a *Agent) WarmStart(ctx context.Context, language, code string) (res agentwire.EvalResult, err error) {
	err = a.call(ctx, "warm", thawed, func(c *content) error {
		if language != "python" || a.c.p.faults.NoPython {
			return errdefs.New(errdefs.ErrUnsupported, "agent warm: there is no %s here", language)
		}
		c.Device.Runners = []string{language}
		for _, line := range strings.Split(code, "\n") {
			if raised, ok := strings.CutPrefix(line, "raise "); ok {
				res.Error = raised
				return nil
			}
			if strings.Contains(line, "=") {
				res = evaluate(c, line, units(a.c.p.shape))
			}
		}
		return nil
	})
	return res, err
}
