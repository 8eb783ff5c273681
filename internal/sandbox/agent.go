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
	// OpenStream opens a byte stream of one of agentwire's kinds. It lives as long as
	// the connection, longer than ctx.
	OpenStream(ctx context.Context, kind string) (net.Conn, error)
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
// A guest that does not answer HELLO keeps nobody from giving up, nor the link from
// being closed.
type link struct {
	machine  engine.Machine
	connect  ConnectFunc
	patience time.Duration // for HELLO

	ctx    context.Context // ends with close
	cancel context.CancelFunc
	turn   chan struct{} // held while connecting

	mu sync.Mutex
	// +checklocks:mu
	agent Agent
}

// helloTimeout is how long a running guest may take to answer HELLO. A forked
// guest needs 50 ms, with 50 of them starting on two cores some seconds.
const helloTimeout = 60 * time.Second

func newLink(m engine.Machine, connect ConnectFunc, patience time.Duration) *link {
	l := &link{machine: m, connect: connect, patience: patience, turn: make(chan struct{}, 1)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// get returns the connection, making one if there is none.
func (l *link) get(ctx context.Context) (Agent, error) {
	if agent := l.current(); agent != nil {
		return agent, nil
	}
	ctx, cancel := context.WithTimeout(ctx, l.patience)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	agent, err := l.make(ctx)
	if err != nil && l.ctx.Err() != nil {
		return nil, errdefs.New(errdefs.ErrUnavailable, "the connection to the agent of %s was closed", l.machine.ID())
	}
	return agent, err
}

func (l *link) current() Agent {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.agent
}

// make connects, one caller at a time.
func (l *link) make(ctx context.Context) (Agent, error) {
	select {
	case l.turn <- struct{}{}:
		defer func() { <-l.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("reach agent of %s: %w", l.machine.ID(), ctx.Err())
	}
	if agent := l.current(); agent != nil {
		return agent, nil
	}
	conn, err := l.machine.DialAgent(ctx)
	if err != nil {
		return nil, err
	}
	agent, err := l.connect(ctx, conn)
	if err != nil {
		return nil, fmt.Errorf("reach agent of %s: %w", l.machine.ID(), err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.ctx.Err(); err != nil {
		_ = agent.Close()
		return nil, err
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

// close drops whatever connection there is and makes no other. It may be repeated.
func (l *link) close() {
	l.cancel()
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
