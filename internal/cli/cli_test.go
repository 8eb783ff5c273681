package cli

import (
	"context"
	"errors"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

const first = "sb00000000000000000001"

// TestTranscripts plays sessions and compares every byte of both streams.
func TestTranscripts(t *testing.T) {
	for _, c := range []struct {
		name string
		tty  bool
		args [][]string
	}{
		{"sandboxes", true, [][]string{
			{"ls"},
			{"fork", "--tag", "py-base", "-n", "2"},
			{"fork", "py-base", "--name", "worker", "--label", "team=a", "--memory-limit", "1G"},
			{"ls"},
			{"ls", "worker"},
			{"kill", first},
			{"kill", first, "worker"},
			{"kill", "absent"},
			{"kill", "--tag", "py-base"},
			{"kill"},
			{"ls"},
		}},
		{"pipe", false, [][]string{
			{"fork", "--tag", "py-base", "-n", "3"},
			{"ls"},
			{"snapshot", "ls"},
			{"images"},
			{"image", "ls"},
			{"kill", "--all"},
			{"kill", "--all"},
		}},
		{"json", false, [][]string{
			{"fork", "py-base", "--json"},
			{"ls", "--json", first},
			{"eval", first, "1", "--json"},
			{"exec", "--json", first, "--", "cmd"},
			{"ping", first, "--json"},
			{"snapshot", "--tag", "x", "--json"},
			{"snapshot", "info", "x", "--json"},
			{"image", "inspect", "python", "--json"},
			{"kill", first, "absent", "--json"},
			{"snapshot", "rm", "x", "--json"},
		}},
		{"snapshots", true, [][]string{
			{"snapshot", "--tag", "my-base", "--image", "python", "--warm", "import numpy, json"},
			{"snapshot", "create", "--tag", "py-data", "--from", "my-base", "--exec", "true", "--exec", "false", "--cpus", "2", "--memory", "1G"},
			{"snapshot", "--tag", "my-base"},
			{"snapshot", "--tag", "my-base", "--replace"},
			{"snapshot"},
			{"snapshot", "ls"},
			{"snapshot", "info", "py-data"},
			{"snapshot-info", "py-base"},
			{"snapshot", "tag", "py-data", "second"},
			{"snapshot", "tag", "py-data", "second"},
			{"snapshot", "untag", "second"},
			{"rmi", "py-base"},
			{"rmi", "py-data", "absent"},
			{"snapshot", "rm", "absent"},
		}},
		{"operate", true, [][]string{
			{"pool", "set", "py-base", "--warm", "20"},
			{"pool", "ls"},
			{"pool", "ls", "--json"},
			{"pool", "set", "py-base"},
			{"pool", "set", "absent", "--warm", "1"},
			{"pool", "set", "py-base", "--warm", "0", "-q"},
			{"pool", "ls"},
			{"fork", "py-base", "--wait", "30s", "--cpu-limit", "1.5", "--pids-limit", "64", "-q"},
			{"fork", "py-base", "--wait", "1h"},
			{"fork", "py-base", "--wait", "soon"},
			{"fork", "py-base", "--cpu-limit", "-1"},
			{"fork", "py-base", "-q"},
			{"stats"},
			{"stats", first},
			{"stats", first, "--json"},
			{"stats", "absent"},
			{"stats", "--watch", "--interval", "1ms"},
			{"logs", first},
			{"logs", "--console", first},
			{"logs", "--build", "py-base"},
			{"logs", "--build", "--console", first},
			{"logs", "absent"},
			{"logs"},
			{"__complete", "logs", "sb000000000000000000"},
			{"__complete", "logs", "py"},
			{"__complete", "logs", first, ""},
			{"__complete", "kill", first, "sb"},
			{"__complete", "fork", "--tag", ""},
			{"__complete", "pool", "set", "p"},
			{"__complete", "image", "rm", ""},
		}},
		{"checkpoints", true, [][]string{
			{"fork", "py-base", "--name", "worker", "-q"},
			{"rollback", "worker"},
			{"checkpoint", "worker"},
			{"checkpoint", "worker", "--label", "risky", "--sync"},
			{"checkpoints", "worker"},
			{"checkpoints", "worker", "--json"},
			{"rollback", "worker"},
			{"rollback", "worker", "risky"},
			{"rollback", "worker", "risky", "--json"},
			{"rollback", "worker", "absent"},
			{"rollback", "absent"},
			{"exec", "worker", "--checkpoint", "--", "true"},
			{"exec", "worker", "--checkpoint", "--json", "--", "true"},
			{"checkpoint", "worker", "--auto", "every=30s,keep=5"},
			{"ls", "worker", "--json"},
			{"checkpoint", "worker", "--auto", "every=1m"},
			{"checkpoint", "worker", "--auto", "off"},
			{"checkpoint", "worker", "--auto", "sometimes"},
			{"checkpoint", "worker", "--auto", "keep=3"},
			{"checkpoint", "worker", "--auto", "off", "--label", "x"},
			{"__complete", "rollback", "worker", "ck"},
			{"tree"},
			{"tree", "worker", "-q"},
			{"tree", "absent"},
			{"diff", "py-base", "worker"},
			{"diff", "py-base", "worker", "-q"},
			{"diff", "py-base", "worker", "--patch"},
			{"diff", "py-base", "worker", "--json"},
			{"diff", "worker", "worker"},
			{"diff", "worker", "absent"},
			{"diff", "worker"},
		}},
		{"images", true, [][]string{
			{"image", "build", "--tag", "tools", "git", "--package", "curl,jq"},
			{"image", "build", "git"},
			{"image", "ls"},
			{"image", "inspect", "tools"},
			{"image", "rm", "tools"},
			{"image", "rm", "python"},
			{"image", "inspect", "tools"},
		}},
		{"guest", false, [][]string{
			{"fork", "py-base"},
			{"eval", first, "1+1"},
			{"exec", first, "--", "ls", "-l"},
			{"exec", first, "missing"},
			{"exec", "absent", "--", "ls"},
			{"exec", first},
			{"exec", first, "ls", "-l"},
			{"run", "--", "echo", "hi"},
			{"run", "--tag", "absent", "--", "echo", "hi"},
			{"ls"},
		}},
		{"usage", false, [][]string{
			{"nonsense"},
			{"fork"},
			{"fork", "a", "--tag", "b"},
			{"fork", "py-base", "-n", "0"},
			{"fork", "py-base", "-n", "-1"},
			{"fork", "py-base", "-n", "100000"},
			{"fork", "py-base", "-n", "many"},
			{"fork", "absent"},
			{"fork", "--tag", "../../etc"},
			{"fork", "py-base", "--memory", "1G"},
			{"fork", "py-base", "--memory", "big"},
			{"fork", "py-base", "--label", "x"},
			{"eval", first, "1", "--timeout", "-1s"},
			{"ls", "--what"},
			{"run"},
			{"demo", "-n", "0"},
			{"version"},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.tty = c.tty
			var text strings.Builder
			for _, args := range c.args {
				text.WriteString(transcript(args, r.run(args...)))
			}
			golden(t, c.name, stable(text.String()))
		})
	}
}

func TestExitCodes(t *testing.T) {
	r := newRig(t)
	r.run("fork", "py-base")
	for _, c := range []struct {
		err       error
		list, run int
	}{
		{errdefs.ErrInternal, 1, 125},
		{errdefs.ErrConflict, 1, 125},
		{errdefs.ErrInvalid, 2, 125},
		{errdefs.ErrNotFound, 3, 125},
		{errdefs.ErrPermission, 5, 125},
		{errdefs.ErrUnauthenticated, 5, 125},
		{errdefs.ErrUnavailable, 1, 125},
		{errdefs.ErrResourceExhausted, 75, 125},
		{errdefs.ErrTimeout, 124, 125},
	} {
		r.svc.Err = errdefs.WithHint(errdefs.New(c.err, "it happened"), "do that")
		for code, args := range map[int][]string{c.list: {"ls"}, c.run: {"run", "--", "true"}} {
			got := r.run(args...)
			if got.code != code || got.stdout != "" || got.stderr != "forkd: it happened\nhint: do that\n" {
				t.Errorf("%v: %v gave %+v, want code %d", c.err, args, got, code)
			}
		}
	}
}

func TestPartialForkIs4(t *testing.T) {
	r := newRig(t)
	r.svc.FailChild = map[int]error{1: errdefs.New(errdefs.ErrGuest, "silent")}
	got := r.run("fork", "py-base", "-n", "3", "--partial")
	if got.code != 4 || strings.Count(got.stdout, "\n") != 2 || got.stderr != "forkd: sandbox 1: silent\n" {
		t.Errorf("partial: %+v", got)
	}
	got = r.run("fork", "py-base", "-n", "3", "--partial", "--json")
	if got.code != 4 || !strings.Contains(got.stdout, `"index": 1`) || !strings.Contains(got.stdout, `"error": "silent"`) {
		t.Errorf("partial, JSON: %+v", got)
	}
	r.svc.FailChild = map[int]error{0: errdefs.New(errdefs.ErrResourceExhausted, "full")}
	got = r.run("fork", "py-base", "--partial")
	if got.code != 75 || got.stdout != "" {
		t.Errorf("none: %+v", got)
	}
}

func TestNoDaemon(t *testing.T) {
	r := newRig(t)
	r.noDaemon()
	started := false
	r.change = func(e *Env) {
		e.StartPrivateDaemon = func(context.Context, string) (string, func() error, error) {
			started = true
			return "", nil, errors.New("must not be asked")
		}
	}
	for _, args := range [][]string{{"ls"}, {"fork", "py-base"}, {"snapshot", "--tag", "x"}, {"kill", "--all"}, {"image", "ls"}, {"demo"}} {
		got := r.run(args...)
		if got.code != 5 || got.stdout != "" || !strings.HasPrefix(got.stderr, "forkd: no forkd daemon answers at unix://") ||
			!strings.HasSuffix(got.stderr, "hint: start one with: forkd serve\n") {
			t.Errorf("%v: %+v", args, got)
		}
	}
	if started {
		t.Error("a private daemon was started although an address was given")
	}
}

// TestPrivateDaemon: run and demo start one when none is found, and stop it.
func TestPrivateDaemon(t *testing.T) {
	r := newRig(t)
	r.env, r.alone = map[string]string{}, true
	if got := r.run("version"); !strings.Contains(got.stdout, "daemon none") {
		t.Fatalf("a daemon is found: %+v", got)
	}
	starts, stops := 0, 0
	r.change = func(e *Env) {
		e.StartPrivateDaemon = func(context.Context, string) (string, func() error, error) {
			starts++
			return r.socket, func() error { stops++; return nil }, nil
		}
	}
	if got := r.run("run", "--", "echo", "hi"); got.code != 0 || got.stdout != "[\"echo\" \"hi\"] \n" {
		t.Errorf("run: %+v", got)
	}
	if starts != 1 || stops != 1 || len(r.svc.Living()) != 0 {
		t.Errorf("%d starts, %d stops, left %v", starts, stops, r.svc.Living())
	}
	if got := r.run("fork", "py-base"); got.code != 5 || starts != 1 {
		t.Errorf("fork: %+v, %d starts", got, starts)
	}
}

func TestExecPassesInputAndCode(t *testing.T) {
	r := newRig(t)
	r.run("fork", "py-base")
	var seen agentwire.ExecRequest
	next := agentwire.ExecResult{ExitCode: 3, Stdout: []byte("out\xff"), Stderr: []byte("err\n")}
	r.svc.OnExec = func(_ context.Context, _ string, q agentwire.ExecRequest) (agentwire.ExecResult, error) {
		seen = q
		return next, nil
	}
	r.stdin = "input\x00"
	r.env["SECRET"] = "s3cret"
	got := r.run("exec", first, "--timeout", "2s", "-e", "A=b=c", "-e", "SECRET", "--cwd", "/tmp", "-u", "nobody", "--", "prog", "--flag", "-x")
	if got.code != 3 || got.stdout != "out\xff" || got.stderr != "err\n" {
		t.Errorf("exec: %+v", got)
	}
	if strings.Join(seen.Argv, " ") != "prog --flag -x" || string(seen.Stdin) != "input\x00" || seen.Env["A"] != "b=c" ||
		seen.Env["SECRET"] != "s3cret" || seen.Cwd != "/tmp" || seen.User != "nobody" || seen.Timeout.Seconds() != 2 {
		t.Errorf("request: %+v", seen)
	}
	if r.run("exec", "--stdin=false", first, "--", "prog"); seen.Stdin != nil {
		t.Errorf("stdin passed: %q", seen.Stdin)
	}
	next = agentwire.ExecResult{ExitCode: 137, Signal: 9, TimedOut: true}
	if got := r.run("exec", first, "--", "prog"); got.code != 124 || !strings.Contains(got.stderr, "did not end in time") {
		t.Errorf("time-out: %+v", got)
	}
	next = agentwire.ExecResult{ExitCode: 137, Signal: 9, OOMKilled: true, StdoutTruncated: true}
	if got := r.run("run", "--", "prog"); got.code != 137 || !strings.Contains(got.stderr, "lack of memory") || !strings.Contains(got.stderr, "dropped") {
		t.Errorf("killed: %+v", got)
	}
}

func TestEvalErrors(t *testing.T) {
	r := newRig(t)
	r.run("fork", "py-base")
	for _, c := range []struct {
		next agentwire.EvalResult
		want outcome
	}{
		{agentwire.EvalResult{Stdout: []byte("a\n")}, outcome{0, "a\n", ""}},
		{agentwire.EvalResult{Error: "ValueError: x", Traceback: "Traceback\nValueError: x\n"}, outcome{1, "", "Traceback\nValueError: x\n"}},
		{agentwire.EvalResult{Error: "SyntaxError: y"}, outcome{1, "", "SyntaxError: y\n"}},
		{agentwire.EvalResult{Error: "timed out", TimedOut: true, RunnerRestarted: true}, outcome{124, "",
			"timed out\nforkd: the code did not end in time and was interrupted\nforkd: the interpreter had to be restarted: what earlier evals left in it is lost\n"}},
	} {
		r.svc.OnEval = func(context.Context, string, agentwire.EvalRequest) (agentwire.EvalResult, error) { return c.next, nil }
		if got := r.run("eval", first, "x"); got != c.want {
			t.Errorf("%+v: got %+v, want %+v", c.next, got, c.want)
		}
	}
	r.svc.OnEval = nil
	r.stdin = "code from stdin"
	if got := r.run("eval", first, "-"); got.stdout != "printed\ncode from stdin\n" {
		t.Errorf("from stdin: %+v", got)
	}
}

// TestInterrupt cancels run in the middle of its program.
func TestInterrupt(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	r.svc.OnExec = func(ctx context.Context, _ string, _ agentwire.ExecRequest) (agentwire.ExecResult, error) {
		cancel()
		<-ctx.Done()
		return agentwire.ExecResult{}, ctx.Err()
	}
	got := r.runContext(ctx, "run", "--", "forever")
	if got.code != 130 || got.stderr != "forkd: interrupted\n" || len(r.svc.Living()) != 0 {
		t.Errorf("%+v, left %v", got, r.svc.Living())
	}
}

func TestProgressOfABuild(t *testing.T) {
	r := newRig(t)
	r.svc.OnFork = func(_ context.Context, f sandbox.Fork) error {
		f.Progress("building\x1b[31m py-base", 0.5)
		return nil
	}
	r.change = func(e *Env) { e.IsTerminal = func(stream any) bool { return stream == any(e.Stderr) } }
	got := r.run("fork", "py-base")
	if !strings.Contains(got.stderr, "\r\x1b[Kbuilding[31m py-base (50%)") || !strings.HasSuffix(got.stderr, "\r\x1b[K") || got.stdout != first+"\n" {
		t.Errorf("%q, %q", got.stdout, got.stderr)
	}
	if got := r.run("fork", "py-base", "-q"); got.stderr != "" {
		t.Errorf("quiet: %q", got.stderr)
	}
}
