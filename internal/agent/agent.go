package agent

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agentwire"
)

// Config says where an agent works.
type Config struct {
	Channel *Channel
	// Root is put before the paths of identity files (/etc/hostname, /run/forkd...).
	Root string
	// System: the machine is ours, so clock, hostname and entropy are set.
	System bool
	// UserKernel: it runs on a user-space kernel, which takes time and randomness from
	// its host, lets nobody set them, and has no cgroup freezer.
	UserKernel bool
	// CgroupDir is a cgroup2 directory for user processes; "" means none, then
	// nothing can be frozen.
	CgroupDir string
	// Log takes one line about something that went wrong.
	Log func(line string)
	// Version of this build.
	Version string
}

// Agent answers the calls of one channel.
type Agent struct {
	cfg      Config
	started  time.Time
	procs    *processes
	groups   *groups
	gate     gate
	identity *identity
	capture  capture
	python   *runner
	oom      oomWatch
	budget   budget
	web      webServer
	build    buildNet
	calls    sync.WaitGroup
	worker   *worker
	ctx      context.Context
	cancel   context.CancelFunc
	stopping chan struct{}
	// methods answers calls; tests of the session put another in.
	methods  func(ctx context.Context, c *call) (answer, error)
	stopOnce sync.Once
}

// New sets an agent up: cgroups, generation file, child reaper.
func New(cfg Config) (*Agent, error) {
	if cfg.Log == nil {
		cfg.Log = func(string) {}
	}
	a := &Agent{cfg: cfg, started: time.Now(), stopping: make(chan struct{})}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.methods = a.answer
	a.budget.init()
	a.gate.init()
	a.oom.happened() // what the kernel killed before is nobody's
	a.worker = newWorker()
	a.procs = newProcesses(cfg.System && !cfg.UserKernel)
	a.groups = newGroups(cfg.CgroupDir, cfg.Log)
	if cfg.UserKernel {
		a.groups.stopper = newStopper()
	}
	a.identity = newIdentity(a)
	a.capture.agent = a
	a.python = newRunner(a)
	a.web.handler = a.healthHandler
	// A collection cycle dirties pages that a fork shares; the limit, which grows
	// with the output held, keeps the heap small without periodic cycles.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(baseHeap)
	return a, nil
}

func (a *Agent) path(p string) string { return filepath.Join(a.cfg.Root, p) }

// Run serves the channel until it ends, ctx ends or a shutdown call came.
func (a *Agent) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, a.stop)
	defer stop()
	ended := make(chan error, 1)
	go withRoom(func() { ended <- a.serve() })
	var err error
	select {
	case err = <-ended:
		a.cfg.Channel.Close()
	case <-a.stopping:
		a.cfg.Channel.Close()
		<-ended
	}
	a.cancel()
	a.web.close()
	a.python.close()
	a.endUsers()
	a.calls.Wait()
	a.worker.close()
	a.procs.close()
	return err
}

// stop makes Run return.
func (a *Agent) stop() { a.stopOnce.Do(func() { close(a.stopping) }) }

// serve reads frames until the channel ends.
func (a *Agent) serve() error {
	reader := agentwire.NewReader(a.cfg.Channel)
	var s *session
	defer func() {
		if s != nil {
			s.end()
		}
	}()
	for {
		f, err := reader.Next()
		var damaged *agentwire.DamagedError
		switch {
		case errors.As(err, &damaged):
			continue // a half-sent frame of an earlier connection, or noise
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case f.Type == agentwire.FrameHello:
			s = a.hello(s, f)
		case s != nil:
			if err := s.handle(f); err != nil {
				a.cfg.Log("connection dropped: " + err.Error())
				s.end()
				s = nil
			}
		}
	}
}

// hello starts a session. A repeated HELLO of the running session only repeats
// the answer; any other one ends it and drops what is queued in it.
func (a *Agent) hello(old *session, f agentwire.Frame) *session {
	var h agentwire.Hello
	if h.Decode(f.Payload) != nil {
		return old
	}
	ack := agentwire.HelloAck{Nonce: h.Nonce, Version: agentwire.Version, AgentVersion: a.cfg.Version}
	if old != nil && old.nonce == h.Nonce && old.link.Err() == nil {
		old.link.Post(agentwire.FrameHelloAck, 0, ack.Append(nil))
		return old
	}
	if old != nil {
		old.end()
	}
	a.cfg.Channel.rearm()
	s := newSession(a, h.Nonce)
	s.link.Post(agentwire.FrameHelloAck, 0, ack.Append(nil))
	return s
}
