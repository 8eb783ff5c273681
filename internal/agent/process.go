package agent

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// processes starts the agent's children and waits for every child of the agent,
// its own and those that orphaned to it: one wait loop, so that nobody takes
// another's exit status.
type processes struct {
	realtime bool // the agent runs at real-time priority and its children must not
	signals  chan os.Signal
	done     chan struct{}

	mu sync.Mutex
	// +checklocks:mu
	running map[int]*process
	// +checklocks:mu
	barred bool
	free   *sync.Cond // of mu: barred has become false
}

// process is a started child. After done is closed, status and usage are set.
type process struct {
	pid    int
	done   chan struct{}
	status syscall.WaitStatus
	usage  syscall.Rusage
}

// startSpec is what to start.
type startSpec struct {
	path  string
	argv  []string
	env   []string
	dir   string
	files []*os.File // descriptors 0, 1, ...; nil entries are /dev/null
	cred  *syscall.Credential
	group *group // nil: wherever the agent is
	ours  bool   // part of a fork: it starts also while nothing of the user may
}

func newProcesses(realtime bool) *processes {
	p := &processes{
		realtime: realtime,
		signals:  make(chan os.Signal, 1),
		done:     make(chan struct{}),
		running:  make(map[int]*process),
	}
	p.free = sync.NewCond(&p.mu)
	// Orphans come to us also when we are not PID 1, so they are reaped here too.
	unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	signal.Notify(p.signals, syscall.SIGCHLD)
	go func() {
		defer close(p.done)
		for range p.signals {
			p.reap()
		}
	}()
	return p
}

func (p *processes) close() {
	signal.Stop(p.signals)
	close(p.signals)
	<-p.done
}

// bar holds programs of the user back that are about to start, until it is called
// with false. A program that was starting has started when it returns.
func (p *processes) bar(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.barred = on
	p.free.Broadcast()
}

// reap collects all children that have ended.
func (p *processes) reap() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		var status syscall.WaitStatus
		var usage syscall.Rusage
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, &usage)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if c := p.running[pid]; c != nil && (status.Exited() || status.Signaled()) {
			delete(p.running, pid)
			c.status, c.usage = status, usage
			close(c.done)
		}
	}
}

// start starts a program in a session of its own. The lock is held until the
// child is known, so that the wait loop cannot take it for an orphan.
func (p *processes) start(spec startSpec) (*process, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.argv[0], err)
	}
	defer null.Close()
	attr := &syscall.ProcAttr{Dir: spec.dir, Env: spec.env, Sys: &syscall.SysProcAttr{Setsid: true, Credential: spec.cred}}
	for _, f := range spec.files {
		if f == nil {
			f = null
		}
		attr.Files = append(attr.Files, f.Fd())
	}
	if spec.group != nil {
		dir, err := spec.group.open()
		if err != nil {
			return nil, fmt.Errorf("start %s: %w", spec.argv[0], err)
		}
		defer dir.Close()
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(dir.Fd())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.barred && !spec.ours {
		p.free.Wait()
	}
	pid, err := p.fork(spec, attr)
	if err != nil {
		return nil, startError(spec, err)
	}
	c := &process{pid: pid, done: make(chan struct{})}
	p.running[pid] = c
	os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte("0"), 0)
	return c, nil
}

// fork forks with the normal scheduling policy, which a child inherits from the
// thread that makes it.
func (p *processes) fork(spec startSpec, attr *syscall.ProcAttr) (int, error) {
	if p.realtime {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		setPolicy(0, unix.SCHED_NORMAL)
		defer setPolicy(0, unix.SCHED_FIFO)
	}
	return syscall.ForkExec(spec.path, spec.argv, attr)
}

// setPolicy sets the scheduling policy of a thread; 0 is the caller's. A kernel
// that refuses leaves the thread as it is.
func setPolicy(tid int, policy uint32) error {
	attr := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: policy}
	if policy == unix.SCHED_FIFO {
		attr.Priority = 1
	}
	return unix.SchedSetAttr(tid, &attr, 0)
}

func startError(spec startSpec, err error) error {
	class := errdefs.ErrInternal
	switch err {
	case syscall.ENOENT, syscall.ENOTDIR:
		return errdefs.WithHint(errdefs.New(errdefs.ErrNotFound, "start %s: the program or its interpreter does not exist", spec.path),
			"install it in the image or give its full path")
	case syscall.EACCES, syscall.EPERM:
		class = errdefs.ErrPermission
	case syscall.ENOEXEC, syscall.E2BIG, syscall.EINVAL:
		class = errdefs.ErrInvalid
	case syscall.EAGAIN, syscall.ENOMEM:
		class = errdefs.ErrResourceExhausted
	}
	return errdefs.New(class, "start %s: %w", spec.path, err)
}

// kill sends a signal to the process's session leader's group.
func (c *process) kill(sig syscall.Signal) {
	select {
	case <-c.done:
	default:
		syscall.Kill(-c.pid, sig)
		syscall.Kill(c.pid, sig)
	}
}
