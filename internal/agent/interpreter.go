package agent

import (
	"bufio"
	_ "embed"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

//go:embed runner.py
var runnerSource string

// bootCode runs the runner as a module of its own, so that __main__ stays the user's.
const bootCode = `import sys
m = sys.modules["_forkd_runner"] = type(sys)("_forkd_runner")
exec(compile(sys.argv.pop(), "<forkd>", "exec"), m.__dict__)
m.main()`

// maxAnswer bounds what an interpreter may answer: a result and a traceback.
const maxAnswer = agentwire.MaxOutputLimit + 4<<20

// interpreter is one live python process and its pipes.
type interpreter struct {
	proc           *process
	group          *group
	requests       *os.File
	raw            syscall.RawConn // of requests
	answers        chan reply      // closed when no more can come
	reading        chan struct{}
	answerFile     *os.File
	stdout, stderr *sink
	pumps          []*pump
	count          uint32
	threads        int // beside the first, when last frozen
	children       int // likewise
	numpy          string
	version        string
}

// startInterpreter starts python with its environment.
func (a *Agent) startInterpreter() (*interpreter, error) {
	who, err := lookupUser("")
	if err != nil {
		return nil, err
	}
	env := a.identity.environ(who)
	python, err := lookPath("python3", "/", env["PATH"])
	if err != nil {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "the image has no python3"), "build an image with the package python3")
	}
	dir := who.home
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		dir = "/"
	}
	ours, theirs, err := pipes(4)
	if err != nil {
		return nil, errdefs.New(errdefs.ErrResourceExhausted, "start python runner: %w", err)
	}
	ip := &interpreter{
		group: a.groups.runner, requests: ours[0], answerFile: ours[1],
		answers: make(chan reply, 1), reading: make(chan struct{}),
		stdout: &sink{budget: &a.budget, limit: betweenLimit}, stderr: &sink{budget: &a.budget, limit: betweenLimit},
	}
	ip.proc, err = a.procs.start(startSpec{
		path: python, argv: []string{"python3", "-X", "utf8", "-c", bootCode, runnerSource},
		env: flatten(env), dir: dir, group: ip.group,
		files: []*os.File{nil, theirs[2], theirs[3], theirs[0], theirs[1]},
	})
	for _, f := range theirs {
		f.Close()
	}
	for i, s := range []*sink{ip.stdout, ip.stderr} {
		p, perr := newPump(ours[2+i], s)
		err = errors.Join(err, perr)
		if perr == nil {
			ip.pumps = append(ip.pumps, p)
		}
	}
	var rerr error
	ip.raw, rerr = ip.requests.SyscallConn()
	go ip.read()
	if err = errors.Join(err, rerr); err != nil {
		ip.close()
		return nil, err
	}
	return ip, nil
}

// betweenLimit bounds output that background threads make between two evals; the
// next eval gets it.
const betweenLimit = 64 << 10

// pipes makes n pipes. The first carries bytes from us to the child, the others back.
func pipes(n int) (ours, theirs []*os.File, err error) {
	for i := range n {
		r, w, err := os.Pipe()
		if err != nil {
			for _, f := range append(ours, theirs...) {
				f.Close()
			}
			return nil, nil, err
		}
		dropAccessTime(r)
		if i == 0 {
			r, w = w, r
		}
		ours, theirs = append(ours, r), append(theirs, w)
	}
	return ours, theirs, nil
}

// dropAccessTime lets the kernel keep no time of the last read, which nobody asks
// for and every read pays.
func dropAccessTime(f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	raw.Control(func(fd uintptr) {
		if flags, err := unix.FcntlInt(fd, unix.F_GETFL, 0); err == nil {
			unix.FcntlInt(fd, unix.F_SETFL, flags|unix.O_NOATIME)
		}
	})
}

// The operations of a runner, their arguments and the flags of its answers;
// runner.py says the same.
const (
	opInfo   = 1
	opSettle = 2
	opEval   = 3 // the argument is the limit of a result
	opReseed = 4 // the argument is one of the next two; 64 bytes of seed, then changes of the environment

	reseedSystem = 0
	reseedAll    = 1
	reseedSeed   = 2

	replyHas = 1 // there is a value
	replyCut = 2 // its text was cut
)

const (
	requestHead = 16
	replyHead   = 32
	replyTexts  = 4
)

// reply is one answer of a runner.
type reply struct {
	id    uint32
	ok    bool
	flags uint32
	texts [replyTexts]string // of an eval: value, error, traceback, numpy's version
}

// read passes answers on until the pipe ends or holds something else.
func (ip *interpreter) read() {
	defer close(ip.reading)
	defer close(ip.answers)
	r := bufio.NewReaderSize(ip.answerFile, 4<<10)
	head := make([]byte, replyHead)
	for {
		if _, err := io.ReadFull(r, head); err != nil {
			return
		}
		n := binary.LittleEndian.Uint32(head)
		if n > maxAnswer {
			return
		}
		body, err := readBody(r, int(n))
		if err != nil {
			return
		}
		answer, ok := parseReply(head, body)
		if !ok {
			return
		}
		select {
		case ip.answers <- answer:
		case <-ip.proc.done:
			return
		}
	}
}

// readBody reads n bytes, taking memory only for what has come.
func readBody(r io.Reader, n int) ([]byte, error) {
	body := make([]byte, 0, min(n, 64<<10))
	for len(body) < n {
		if len(body) == cap(body) {
			grown := make([]byte, len(body), min(n, 2*cap(body)))
			copy(grown, body)
			body = grown
		}
		k, err := r.Read(body[len(body):min(n, cap(body))])
		body = body[:len(body)+k]
		if err != nil {
			return nil, err
		}
	}
	return body, nil
}

// parseReply takes an answer apart. Precondition: head has replyHead bytes.
func parseReply(head, body []byte) (reply, bool) {
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(head[4*i:]) }
	a := reply{id: word(1), ok: word(2) == 1, flags: word(3)}
	for i := range a.texts {
		n := word(4 + i)
		if uint64(n) > uint64(len(body)) {
			return reply{}, false
		}
		a.texts[i] = string(body[:n])
		body = body[n:]
	}
	return a, len(body) == 0
}

// question is a request under way.
type question struct {
	ip   *interpreter
	id   uint32
	sent chan struct{} // nil if it was sent at once
}

// atomicWrite is PIPE_BUF: a pipe takes as much in whole or not at all.
const atomicWrite = 4096

// ask sends a request; its answer is taken with wait. One at a time.
func (ip *interpreter) ask(op, arg uint32, payload string) *question {
	ip.count++
	q := &question{ip: ip, id: ip.count}
	b := make([]byte, requestHead, requestHead+len(payload))
	for i, v := range [...]uint32{uint32(len(payload)), op, q.id, arg} {
		binary.LittleEndian.PutUint32(b[4*i:], v)
	}
	b = append(b, payload...)
	// A pipe whose reader waits takes a short request at once. Errors are ignored:
	// a runner that ended is noticed by its exit.
	n := 0
	ip.raw.Control(func(fd uintptr) { n, _ = unix.Write(int(fd), b[:min(len(b), atomicWrite)]) })
	if b = b[max(n, 0):]; len(b) > 0 {
		q.sent = make(chan struct{})
		go func() {
			defer close(q.sent)
			ip.requests.Write(b)
		}()
	}
	return q
}

func (ip *interpreter) alive() bool {
	select {
	case <-ip.proc.done:
		return false
	default:
		return true
	}
}

func (ip *interpreter) interrupt() { syscall.Kill(ip.proc.pid, syscall.SIGINT) }

// kill ends the runner and all that it started.
func (ip *interpreter) kill() {
	if ip.proc == nil {
		return
	}
	ip.group.kill()
	ip.proc.kill(syscall.SIGKILL)
	<-ip.proc.done
}

// flush sees to it that all output written so far is in the sinks.
func (ip *interpreter) flush() {
	for _, p := range ip.pumps {
		p.flush()
	}
}

// close ends the interpreter and frees what it holds.
func (ip *interpreter) close() {
	ip.kill()
	ip.requests.Close()
	ip.answerFile.Close()
	<-ip.reading
	for _, p := range ip.pumps {
		p.close()
	}
	for _, s := range []*sink{ip.stdout, ip.stderr} {
		s.budget.give(s.take().reserved)
	}
}

// howEnded says in words how the process ended.
func howEnded(p *process, oom bool) string {
	switch {
	case oom:
		return "killed: out of memory"
	case p.status.Signaled():
		return "killed by signal " + strconv.Itoa(int(p.status.Signal())) + " (" + p.status.Signal().String() + ")"
	}
	return "exit code " + strconv.Itoa(p.status.ExitStatus())
}
