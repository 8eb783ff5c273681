package agent

import (
	"bytes"
	"context"
	"sync"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

const (
	languagePython = "python"
	// graceTime is how long an interrupted eval may take to end.
	graceTime = 2 * time.Second
	// startTime bounds the start of an interpreter, slow in an emulated guest.
	startTime = 2 * time.Minute
	// exitTime is how long a runner that closed its pipe may take to be gone.
	exitTime = time.Second
	// warmTime is the default limit of warm code.
	warmTime = 10 * time.Minute
	// reseedTime bounds the reseeding of an idle runner.
	reseedTime = 20 * time.Second
)

// runner keeps one warm python interpreter. It starts at the first use and again
// after its end, with the warm code run anew.
type runner struct {
	agent *Agent
	turn  chan struct{} // holds a token while the interpreter is used

	mu sync.Mutex
	// +checklocks:mu
	live *interpreter
	// +checklocks:mu
	busy bool // an eval is running
	// +checklocks:mu
	python, numpy string
	// +checklocks:mu
	pending *reseed // delayed by a running eval

	warm []string // code that ran at warm starts; belongs to who has the turn
}

func newRunner(a *Agent) *runner { return &runner{agent: a, turn: make(chan struct{}, 1)} }

// begin takes the turn while the gate is open. Nobody waits for the gate with the
// turn in hand: a fork needs it to reseed an idle runner.
func (r *runner) begin(ctx context.Context) error {
	for {
		if err := r.agent.gate.pass(ctx); err != nil {
			return err
		}
		select {
		case r.turn <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		if r.agent.gate.isOpen() {
			return nil
		}
		r.unlock()
	}
}

func (r *runner) unlock() { <-r.turn }

// set publishes the live interpreter and what is known about it.
func (r *runner) set(ip *interpreter, busy bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.live, r.busy = ip, busy
	r.python, r.numpy = "", ""
	if ip != nil {
		r.python, r.numpy = ip.version, ip.numpy
	}
}

// ready returns the live interpreter, started if needed. restarted says that an
// earlier one had ended by itself. Precondition: the caller has the turn.
func (r *runner) ready(ctx context.Context) (ip *interpreter, restarted bool, err error) {
	if ip = r.live; ip != nil {
		if ip.alive() {
			return ip, false, r.catchUp(ctx, ip)
		}
		restarted = true
		r.drop()
	}
	ip, err = r.agent.startInterpreter()
	if err != nil {
		return nil, restarted, err
	}
	r.set(ip, false)
	told, end := r.question(ctx, ip.ask(opInfo, 0, ""), startTime)
	if end != evalAnswered || !told.ok {
		ip.flush()
		said := ip.stderr.take()
		r.agent.budget.give(said.reserved)
		r.drop()
		if ctx.Err() != nil {
			return nil, restarted, ctx.Err()
		}
		return nil, restarted, errdefs.New(errdefs.ErrUnavailable, "python runner did not start: %s", lastLine(said.text()))
	}
	ip.version = told.texts[0]
	for i, code := range r.warm {
		res := r.evaluate(ctx, ip, code, warmTime, betweenLimit)
		res.release()
		if res.Error != "" {
			r.drop()
			return nil, restarted, errdefs.New(errdefs.ErrUnavailable, "python runner restarted, but its warm code %d failed: %s", i+1, res.Error)
		}
	}
	r.set(ip, false)
	return ip, restarted, r.catchUp(ctx, ip) // a fork may have come while it started
}

func lastLine(text []byte) string {
	text = bytes.TrimSpace(text)
	if i := bytes.LastIndexByte(text, '\n'); i >= 0 {
		text = text[i+1:]
	}
	if len(text) == 0 {
		return "it ended without a word"
	}
	return string(text[:min(len(text), 500)])
}

// drop ends the interpreter. Precondition: the caller has the turn.
func (r *runner) drop() {
	ip := r.live
	if ip == nil {
		return
	}
	r.set(nil, false)
	ip.close()
}

func (r *runner) close() {
	r.turn <- struct{}{}
	defer r.unlock()
	r.drop()
}

// eval evaluates code; evals wait for each other.
func (r *runner) eval(ctx context.Context, m agentwire.EvalRequest) (answer, error) {
	timeout, limit, err := checkBounds(m.Timeout, m.OutputLimit)
	if err != nil {
		return answer{}, err
	}
	if err := r.begin(ctx); err != nil {
		return answer{}, err
	}
	defer r.unlock()
	ip, restarted, err := r.ready(ctx)
	if err != nil {
		return answer{}, err
	}
	res := r.evaluate(ctx, ip, m.Code, timeout, limit)
	res.RunnerRestarted = res.RunnerRestarted || restarted
	if ctx.Err() != nil {
		res.release()
		return answer{}, errdefs.New(errdefs.ErrCanceled, "eval: canceled")
	}
	return res.answer(), nil
}

// warmStart starts the interpreter and runs warm code in it, which runs again
// whenever the interpreter has to be restarted.
func (r *runner) warmStart(ctx context.Context, m agentwire.WarmStart) (answer, error) {
	timeout := m.Timeout
	if timeout == 0 {
		timeout = warmTime
	}
	if _, _, err := checkBounds(timeout, 0); err != nil {
		return answer{}, err
	}
	if err := r.begin(ctx); err != nil {
		return answer{}, err
	}
	defer r.unlock()
	ip, _, err := r.ready(ctx)
	if err != nil {
		return answer{}, err
	}
	res := r.evaluate(ctx, ip, m.Code, timeout, agentwire.DefaultOutputLimit)
	if res.Error == "" {
		if m.Code != "" {
			r.warm = append(r.warm, m.Code)
		}
		if _, end := r.question(ctx, ip.ask(opSettle, 0, ""), startTime); end != evalAnswered {
			r.drop()
		}
	}
	if ctx.Err() != nil {
		res.release()
		return answer{}, errdefs.New(errdefs.ErrCanceled, "warm start: canceled")
	}
	return res.answer(), nil
}

// interrupt raises KeyboardInterrupt in a running eval, if there is one.
func (r *runner) interrupt() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live != nil && r.busy {
		r.live.interrupt()
	}
	return nil
}

// evalEnd is how the wait for an answer ended.
type evalEnd int

const (
	evalAnswered evalEnd = iota
	evalDied
	evalTimeout
	evalCanceled
)

// question waits for the answer to q, at most timeout of time in which the gate is open.
func (r *runner) question(ctx context.Context, q *question, timeout time.Duration) (reply, evalEnd) {
	left := r.agent.gate.clock(timeout)
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	var reopened <-chan struct{}
	for {
		select {
		case got, ok := <-q.ip.answers:
			if !ok {
				return reply{}, evalDied
			}
			if got.id != q.id { // from a copy of the runner or from user code
				continue
			}
			if q.sent != nil {
				<-q.sent
			}
			return got, evalAnswered
		case <-q.ip.proc.done:
			return reply{}, evalDied
		case <-ctx.Done():
			return reply{}, evalCanceled
		case <-timer.C:
			reopened, _ = r.agent.gate.opened()
		case <-reopened:
			reopened = nil
			rest := left()
			if rest <= 0 {
				return reply{}, evalTimeout
			}
			timer.Reset(rest)
		}
	}
}

// evaluated is the outcome of an eval with its output, which counts in the budget
// until release.
type evaluated struct {
	agentwire.EvalResult
	budget         *budget
	stdout, stderr output
}

func (e *evaluated) release() { e.budget.give(e.stdout.reserved + e.stderr.reserved) }

func (e *evaluated) answer() answer {
	return answer{body: e.Parts(e.stdout.pieces, e.stderr.pieces), after: e.release}
}

// evaluate runs code in ip. Precondition: the caller has the turn.
func (r *runner) evaluate(ctx context.Context, ip *interpreter, code string, timeout time.Duration, limit int) *evaluated {
	begin := time.Now()
	ip.stdout.setLimit(limit)
	ip.stderr.setLimit(limit)
	r.set(ip, true)
	q := ip.ask(opEval, uint32(limit), code)
	told, end := r.question(ctx, q, timeout)
	res := &evaluated{budget: &r.agent.budget}
	if end == evalTimeout || end == evalCanceled {
		res.TimedOut = end == evalTimeout
		ip.interrupt()
		told, end = r.question(context.Background(), q, graceTime)
	}
	if end == evalAnswered {
		takeResult(&res.EvalResult, ip, told)
	}
	if res.TimedOut {
		res.HasResult, res.Result = false, ""
		res.Error = "TimeoutError: the code did not end within " + timeout.String()
	}
	if end != evalAnswered {
		res.RunnerRestarted = true
		r.describeEnd(&res.EvalResult, ip, end)
	}
	ip.flush()
	res.stdout, res.stderr = ip.stdout.take(), ip.stderr.take()
	res.StdoutTruncated, res.StderrTruncated = res.stdout.truncated, res.stderr.truncated
	ip.stdout.setLimit(betweenLimit)
	ip.stderr.setLimit(betweenLimit)
	res.Duration = time.Since(begin)
	if end != evalAnswered {
		r.drop()
	} else {
		r.set(ip, false)
	}
	return res
}

// describeEnd says how the interpreter ended, or ends it.
func (r *runner) describeEnd(res *agentwire.EvalResult, ip *interpreter, end evalEnd) {
	if end == evalDied { // its pipe may end a moment before the process does
		r.agent.gate.await(context.Background(), ip.proc.done, exitTime)
	}
	if end == evalDied && !ip.alive() {
		res.Error = "RunnerDied: the python runner ended: " + howEnded(ip.proc, ip.proc.status.Signal() == syscall.SIGKILL && r.agent.oom.happened())
		return
	}
	ip.kill()
	switch {
	case res.TimedOut:
		res.Error += " and ignored the interrupt; the runner was killed"
	case end == evalDied:
		res.Error = "RunnerDied: the python runner broke its protocol and was killed"
	default:
		res.Error = "RunnerDied: the code ignored the interrupt; the runner was killed"
	}
}

// takeResult fills res from the runner's answer, which user code may have forged.
func takeResult(res *agentwire.EvalResult, ip *interpreter, told reply) {
	if !told.ok {
		res.Error = told.texts[0]
		return
	}
	res.HasResult, res.ResultTruncated = told.flags&replyHas != 0, told.flags&replyCut != 0
	res.Result, res.Error, res.Traceback = told.texts[0], told.texts[1], told.texts[2]
	ip.numpy = told.texts[3]
}

// describe fills in what a ping tells about the runner, without asking it.
func (r *runner) describe(_ context.Context, p *agentwire.Pong) {
	r.mu.Lock()
	ip := r.live
	p.PythonVersion, p.NumpyVersion = r.python, r.numpy
	r.mu.Unlock()
	if ip == nil || !ip.alive() {
		p.PythonVersion, p.NumpyVersion = "", ""
		return
	}
	p.WarmupReady, p.Runners = true, []string{languagePython}
	p.Threads, p.Children = ip.extras()
}
