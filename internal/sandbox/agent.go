package sandbox

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// Agent is a connection to the agent of one machine. A failed call of class
// ErrGuest means that the connection is of no more use.
type Agent interface {
	Boot(ctx context.Context, cfg agentwire.BootConfig) error
	Ping(ctx context.Context) (agentwire.Pong, error)
	Exec(ctx context.Context, req agentwire.ExecRequest) (agentwire.ExecResult, error)
	Eval(ctx context.Context, req agentwire.EvalRequest) (agentwire.EvalResult, error)
	// WarmStart starts the runner of language and runs code in it. What the code
	// raised stands in the result.
	WarmStart(ctx context.Context, language, code string) (agentwire.EvalResult, error)
	Capturer
	VerdictFork(ctx context.Context, id agentwire.Identity) (agentwire.Receipt, error)
	Close() error
}

// Capturer is the agent's part in a capture.
type Capturer interface {
	// Prepare freezes user processes and, if asked, writes file systems out.
	Prepare(ctx context.Context, m agentwire.Prepare) error
	// Commit is the last message before the stop. From then on the agent waits
	// without limit for a verdict.
	Commit(ctx context.Context) error
	// VerdictSource tells the agent that it is the source and goes on.
	VerdictSource(ctx context.Context) error
}

// ConnectFunc says hello to the agent at the other end of conn, which it owns
// from then on, also on error.
type ConnectFunc func(ctx context.Context, conn net.Conn) (Agent, error)

// link keeps one agent connection to a machine and makes a new one when it broke.
type link struct {
	machine  engine.Machine
	connect  ConnectFunc
	patience time.Duration // for HELLO; 0 means helloTimeout

	mu sync.Mutex // held while connecting
	// +checklocks:mu
	agent Agent
}

// helloTimeout is how long a running guest may take to answer HELLO. A forked
// guest needs 50 ms, with 50 of them starting on two cores some seconds.
const helloTimeout = 60 * time.Second

// get returns the connection, making one if there is none.
func (l *link) get(ctx context.Context) (Agent, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.agent != nil {
		return l.agent, nil
	}
	patience := l.patience
	if patience == 0 {
		patience = helloTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := l.machine.DialAgent(ctx)
	if err != nil {
		return nil, err
	}
	agent, err := l.connect(ctx, conn)
	if err != nil {
		return nil, fmt.Errorf("reach agent of %s: %w", l.machine.ID(), err)
	}
	l.agent = agent
	return agent, nil
}

// drop closes agent, if it is still the one in use.
func (l *link) drop(agent Agent) {
	l.mu.Lock()
	if l.agent == agent {
		l.agent = nil
	}
	l.mu.Unlock()
	if agent != nil {
		_ = agent.Close()
	}
}

// close drops whatever connection there is.
func (l *link) close() {
	l.mu.Lock()
	agent := l.agent
	l.agent = nil
	l.mu.Unlock()
	if agent != nil {
		_ = agent.Close()
	}
}

// call runs fn with the connection; one that turns out broken is dropped, so that
// the next call makes a new one.
func (l *link) call(ctx context.Context, fn func(Agent) error) error {
	agent, err := l.get(ctx)
	if err != nil {
		return err
	}
	err = fn(agent)
	switch errdefs.Class(err) {
	case errdefs.ErrGuest, errdefs.ErrUnavailable:
		l.drop(agent)
	}
	return err
}
