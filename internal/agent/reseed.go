package agent

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// countExtras counts for the forks of a capture that is under way, so that they
// need not look themselves. Frozen processes cannot start others.
func (r *runner) countExtras() {
	r.mu.Lock()
	ip := r.live
	r.mu.Unlock()
	if ip != nil && ip.alive() {
		ip.threads, ip.children = ip.extras()
	}
}

// extras counts threads beside the first and processes that the runner started.
func (ip *interpreter) extras() (threads, children int) {
	pid := strconv.Itoa(ip.proc.pid)
	tasks, _ := os.ReadDir("/proc/" + pid + "/task")
	threads = max(len(tasks)-1, 0)
	if ip.group != nil {
		b, _ := os.ReadFile(filepath.Join(ip.group.dir, "cgroup.procs"))
		return threads, max(len(bytes.Fields(b))-1, 0)
	}
	return threads, len(descendants(ip.proc.pid))
}

// reseedRunner makes the generators of an idle runner unique before anything
// else of the user runs. One in the middle of an eval is done before the next.
func (f *fork) reseedRunner(ctx context.Context, env []string, frozen bool) {
	const name = "runner:" + languagePython
	r := f.agent.python
	request := f.reseedRequest(env)
	select {
	case r.turn <- struct{}{}:
		defer r.unlock()
	default:
		f.busyRunner(name, request)
		return
	}
	ip := r.live
	if ip == nil || !ip.alive() {
		f.step(name, "absent", "")
		return
	}
	threads, children := ip.threads, ip.children
	if !frozen {
		threads, children = ip.extras()
	}
	if threads+children > 0 {
		f.note("the python runner has " + strconv.Itoa(threads) + " extra threads and " + strconv.Itoa(children) + " processes, which were not reseeded one by one")
	}
	if frozen {
		err := ip.group.setFrozen(false)
		if s := f.agent.groups.stopper; s != nil {
			err = s.let(ip.proc.pid)
		}
		if err != nil {
			f.step(name, "failed", err.Error())
			return
		}
	}
	told, end := r.ungated(ctx, request.ask(ip))
	if end != evalAnswered || !told.ok {
		r.drop()
		f.step(name, "failed", "it did not reseed and was ended; the next eval starts a new one")
		return
	}
	f.step(name, "done", told.texts[0])
}

// reseed is a request to a runner: new generators and changes of the environment.
type reseed struct {
	mode    uint32
	payload string
}

func (q *reseed) ask(ip *interpreter) *question { return ip.ask(opReseed, q.mode, q.payload) }

const seedSize = 64

func (f *fork) reseedRequest(env []string) *reseed {
	q := &reseed{mode: reseedAll}
	switch f.m.Reseed {
	case agentwire.ReseedSystem:
		q.mode = reseedSystem
	case agentwire.ReseedSeed:
		q.mode, q.payload = reseedSeed, string(f.m.RunnerSeed)+strings.Join(env, "\x00")
		return q
	}
	var seed [seedSize]byte
	unix.Getrandom(seed[:], 0)
	for i := range seed { // right even where the kernel's generator is not ours to seed
		seed[i] ^= f.m.Entropy[i%len(f.m.Entropy)]
	}
	q.payload = string(seed[:])
	if len(env) > 0 {
		q.payload += strings.Join(env, "\x00")
	}
	return q
}

func (f *fork) busyRunner(name string, request *reseed) {
	r := f.agent.python
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending = request
	if !r.busy {
		f.step(name, "failed", "it is about to evaluate; its generators are reseeded before that, or before the next eval")
		f.note("python code that was about to run at the fork may go on with its parent's generators")
		return
	}
	f.step(name, "failed", "an eval is running; its generators are reseeded before the next one")
	f.note("the python code that was running at the fork goes on with its parent's generators")
}

// ungated asks while the gate is shut, when question would wait for it to open.
func (r *runner) ungated(ctx context.Context, q *question) (reply, evalEnd) {
	timer := time.NewTimer(reseedTime)
	defer timer.Stop()
	for {
		select {
		case got, ok := <-q.ip.answers:
			if !ok {
				return reply{}, evalDied
			}
			if got.id == q.id {
				return got, evalAnswered
			}
		case <-q.ip.proc.done:
			return reply{}, evalDied
		case <-timer.C:
			return reply{}, evalTimeout
		case <-ctx.Done():
			return reply{}, evalCanceled
		}
	}
}

func (r *runner) takePending() *reseed {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.pending
	r.pending = nil
	return p
}

// catchUp applies a reseed that came while an eval was running.
func (r *runner) catchUp(ctx context.Context, ip *interpreter) error {
	request := r.takePending()
	if request == nil {
		return nil
	}
	told, end := r.question(ctx, request.ask(ip), reseedTime)
	if end != evalAnswered || !told.ok {
		r.drop()
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "python runner could not be reseeded and was ended"), "repeat the call: a new runner starts")
	}
	return nil
}
