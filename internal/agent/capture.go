package agent

import (
	"context"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

const (
	// watchdogTime is how long user processes stay frozen if no commit follows a prepare.
	watchdogTime = 30 * time.Second
	// freezeTime bounds the wait until all user processes are frozen.
	freezeTime = 10 * time.Second
)

// capture is the guest's part in a capture: running, prepared (frozen, the
// watchdog ticks) or committed (frozen until the verdict, however long it takes).
type capture struct {
	agent *Agent

	turn sync.Mutex // one prepare or verdict at a time; held while processes freeze and thaw

	ssh, hooks bool // there may be host keys, hooks; belongs to who has the turn

	mu sync.Mutex
	// +checklocks:mu
	frozen bool
	// +checklocks:mu
	watchdog *time.Timer // nil once committed
}

// prepare freezes user processes. On an error nothing is frozen.
func (c *capture) prepare(ctx context.Context, m agentwire.Prepare) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.mu.Lock()
	if c.frozen {
		c.mu.Unlock()
		return errdefs.New(errdefs.ErrConflict, "a capture is already prepared")
	}
	c.frozen = true
	c.mu.Unlock()
	c.agent.gate.shut()
	if err := c.freeze(ctx, m); err != nil {
		c.thaw()
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watchdog = time.AfterFunc(watchdogTime, c.expire)
	return nil
}

func (c *capture) freeze(ctx context.Context, m agentwire.Prepare) error {
	if m.Sync { // most of it while the user's processes run: the second time is short
		if err := c.syncRoot(); err != nil {
			return err
		}
	}
	if err := c.hold(ctx); err != nil {
		return err
	}
	if m.Sync {
		if err := c.syncRoot(); err != nil {
			return err
		}
	}
	if !m.Known || c.hooks { // hooks ran since the last verdict, and may do anything
		c.look()
	}
	if m.Settle {
		settleHeap()
	}
	return nil
}

// hold stops everything of the user.
func (c *capture) hold(ctx context.Context) error {
	g := c.agent.groups
	if g.stopper != nil {
		g.close()
		c.agent.procs.bar(true)
		if err := g.stopper.stop(ctx, freezeTime); err != nil {
			return errdefs.New(errdefs.ErrTimeout, "stop user processes: %w", err)
		}
		return nil
	}
	leaves := []*group{g.runner}
	// An empty leaf stays as it is: each thaw costs a fork, and nothing can get in.
	if g.close() {
		leaves = append(leaves, g.execs)
	}
	for _, leaf := range leaves {
		if err := leaf.setFrozen(true); err != nil {
			return errdefs.New(errdefs.ErrInternal, "freeze user processes: %w", err)
		}
	}
	for _, leaf := range leaves {
		if err := leaf.awaitFrozen(ctx, freezeTime); err != nil {
			return errdefs.New(errdefs.ErrTimeout, "freeze user processes: %w", err)
		}
	}
	return nil
}

// look finds out what a fork will need to know: once while user processes are
// frozen, for all forks of the capture.
func (c *capture) look() {
	a := c.agent
	a.python.countExtras()
	a.identity.look()
	c.ssh = unix.Access(a.path(sshDir), unix.F_OK) == nil
	c.hooks = unix.Access(a.path(hookDir), unix.F_OK) == nil
}

func (c *capture) syncRoot() error {
	f, err := os.Open("/")
	if err != nil {
		return errdefs.New(errdefs.ErrInternal, "sync root: %w", err)
	}
	defer f.Close()
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return errdefs.New(errdefs.ErrInternal, "sync root: %w", err)
	}
	return nil
}

// commit is the last call before the stop: from here on only a verdict thaws.
func (c *capture) commit() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.frozen || c.watchdog == nil || !c.watchdog.Stop() {
		return errdefs.New(errdefs.ErrConflict, "no capture is prepared, or its time ran out")
	}
	c.watchdog = nil
	return nil
}

// expire is the watchdog: nobody committed, so the guest goes on.
func (c *capture) expire() {
	c.turn.Lock()
	defer c.turn.Unlock()
	c.mu.Lock()
	live := c.watchdog != nil
	c.mu.Unlock()
	if live {
		c.agent.cfg.Log("no commit followed a prepare: thawing")
		c.thaw()
	}
}

// release thaws: the verdict "source".
func (c *capture) release() error {
	c.turn.Lock()
	defer c.turn.Unlock()
	return c.thaw()
}

// thaw lets user processes go on. It may be repeated.
func (c *capture) thaw() error {
	c.mu.Lock()
	if c.watchdog != nil {
		c.watchdog.Stop()
		c.watchdog = nil
	}
	c.frozen = false
	c.mu.Unlock()
	g := c.agent.groups
	var first error
	for _, leaf := range [...]*group{g.runner, g.execs} {
		if err := leaf.setFrozen(false); err != nil && first == nil {
			first = errdefs.New(errdefs.ErrInternal, "thaw user processes: %w", err)
		}
	}
	if g.stopper != nil {
		first = g.stopper.letAll()
		c.agent.procs.bar(false)
	}
	g.reopen()
	c.agent.gate.reopen()
	return first
}

// fork is one run of the fork contract.
type fork struct {
	agent   *Agent
	call    *call
	m       agentwire.Identity
	receipt agentwire.Receipt
}

// become makes this machine the sandbox m describes: the verdict "fork". The
// steps stand in the order of the contract. If one of those that make a fork
// unique fails, the error goes to the host and user processes stay frozen.
func (c *capture) become(ctx context.Context, from *call, m agentwire.Identity) (*agentwire.Receipt, error) {
	begin := time.Now()
	c.turn.Lock()
	defer c.turn.Unlock()
	a := c.agent
	if err := checkIdentity(m, a.identity.generationNow()); err != nil {
		return nil, err
	}
	c.mu.Lock()
	wasFrozen := c.frozen
	if c.watchdog != nil {
		c.watchdog.Stop()
		c.watchdog = nil
	}
	c.mu.Unlock()
	if !wasFrozen {
		c.look()
	}
	f := &fork{agent: a, call: from, m: m}
	f.receipt.Generation = m.Generation
	f.receipt.Steps = make([]agentwire.ReceiptStep, 0, usualSteps)
	if err := f.makeUnique(ctx); err != nil {
		return nil, err
	}
	changes, err := f.tellFork()
	if err != nil {
		return nil, err
	}
	if err := f.must("generation_file", "", a.identity.setGeneration(m.Generation)); err != nil {
		return nil, err
	}
	if err := f.clockRounds(ctx); err != nil {
		return nil, errdefs.New(errdefs.Class(err), "wall_clock: %w", err)
	}
	f.reseedRunner(ctx, changes, wasFrozen)
	f.runHooks(ctx)
	f.step("tcp_connections", "absent", "the guest has no network device")
	how := ""
	if a.groups.stopper != nil {
		how = "user processes were stopped by signals: this kernel has no freezer"
	}
	if err := f.must("thaw", how, c.thaw()); err != nil {
		return nil, err
	}
	switch {
	case !wasFrozen:
		f.note("user processes were not frozen at the fork")
	case a.groups.dir == "" && a.groups.stopper == nil:
		f.note("user processes could not be frozen: there is no cgroup freezer")
	}
	f.receipt.Duration = time.Since(begin)
	return &f.receipt, nil
}

func (f *fork) step(name, status, detail string) {
	f.receipt.Steps = append(f.receipt.Steps, agentwire.ReceiptStep{Name: name, Status: status, Detail: detail})
}

func (f *fork) note(text string) { f.receipt.NotCovered = append(f.receipt.NotCovered, text) }

// must records a step that a fork cannot do without.
func (f *fork) must(name, detail string, err error) error {
	if err != nil {
		return errdefs.New(errdefs.Class(err), "%s: %w", name, err)
	}
	f.step(name, "done", detail)
	return nil
}

// can records a step that may fail.
func (f *fork) can(name, detail string, err error) {
	if err != nil {
		f.step(name, "failed", err.Error())
		return
	}
	f.step(name, "done", detail)
}

// system records a step that acts on the kernel, which may not be ours.
func (f *fork) system(name, detail string, err error) error {
	if err == nil && !f.agent.cfg.System {
		f.step(name, "absent", "the agent does not control this kernel")
		return nil
	}
	return f.must(name, detail, err)
}

// usualSteps is how many steps a fork takes without hooks.
const usualSteps = 16

// makeUnique does the steps that must not fail up to the token. Meanwhile the host
// judges the clock it was told; clockRounds takes the outcome.
func (f *fork) makeUnique(ctx context.Context) error {
	id := f.agent.identity
	var random, clock string
	if f.agent.cfg.UserKernel {
		random, clock = "the user-space kernel draws from the host's generator at each use", "the user-space kernel reads the host's clock"
	}
	if err := f.system("kernel_csprng", random, id.seed(f.m.Entropy)); err != nil {
		return err
	}
	if err := f.system("wall_clock", clock, id.setClock(f.m.HostTime)); err != nil {
		return err
	}
	f.sayClock()
	runtime.Gosched() // it goes out now, or the time it tells grows old
	if f.m.Keep {
		for _, name := range [...]string{"hostname", "machine_id", "boot_id", "ssh_host_keys", "token"} {
			f.step(name, "kept", "")
		}
		return nil
	}
	if err := f.must("hostname", f.m.Hostname, id.setHostname(f.m.Hostname)); err != nil {
		return err
	}
	if err := f.must("machine_id", "", id.setMachineID(f.m.MachineID)); err != nil {
		return err
	}
	f.can("boot_id", "as programs see it; the kernel's own cannot change", id.bootID.write(f.m.BootID+"\n"))
	f.sshKeys(ctx)
	return f.must("token", "", id.setToken(f.m.Token))
}

// clockLimit bounds the whole of the clock rounds: a host that vanished must not
// keep a verdict open for ever.
const clockLimit = 30 * time.Second

// sayClock tells the host our wall time.
func (f *fork) sayClock() {
	now := agentwire.Clock{Wall: f.agent.identity.now()}
	f.call.session.link.PostCoded(agentwire.FrameNote, f.call.id, agentwire.NoteClocked, now.Append(nil))
}

// clockRounds takes the host's corrections until it says that the clock is right.
func (f *fork) clockRounds(ctx context.Context) error {
	limit := time.NewTimer(clockLimit)
	defer limit.Stop()
	for {
		select {
		case n := <-f.call.notes:
			switch n.code {
			case agentwire.NoteClockOK:
				return nil
			case agentwire.NoteClock:
				var m agentwire.Clock
				if err := m.Decode(n.body); err != nil {
					return errdefs.As(errdefs.ErrInvalid, err)
				}
				if err := f.agent.identity.setClock(m.Wall); err != nil {
					return err
				}
				f.sayClock()
			}
		case <-f.call.session.link.Done():
			return errdefs.New(errdefs.ErrUnavailable, "the host went away")
		case <-ctx.Done():
			return ctx.Err()
		case <-limit.C:
			return errdefs.New(errdefs.ErrTimeout, "the host did not confirm the clock")
		}
	}
}

// tellFork gives the environment and the file about the fork call. It returns what
// changes in a running interpreter.
func (f *fork) tellFork() ([]string, error) {
	if f.m.Keep {
		f.step("env", "kept", "")
		return nil, nil
	}
	if err := f.agent.identity.fork.write(string(f.m.Fork)); err != nil {
		return nil, errdefs.New(errdefs.ErrInternal, "write %s: %w", forkFile, err)
	}
	return f.giveEnv(), nil
}

// giveEnv records the environment and returns what changes in a running interpreter.
func (f *fork) giveEnv() []string {
	changes := f.agent.identity.setEnv(f.m)
	status := "done"
	if len(f.m.Env)+len(f.m.Secrets) == 0 {
		status = "absent"
	}
	names := ""
	for k := range f.m.Env {
		if names != "" {
			names += " "
		}
		names += k
	}
	f.step("env", status, names)
	return changes
}
