package e2e

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	forkd "forkd.dev/forkd/sdk/go"
)

// TestHardPrograms runs programs that end badly or say too much. Each gets a
// right answer, and the sandbox stays usable.
func TestHardPrograms(t *testing.T) {
	w := running(t)
	sb := w.fork(t, "py-base", 1)[0].ID
	shell := func(script string, secs float64) forkd.ExecRequest {
		return forkd.ExecRequest{Args: []string{"sh", "-c", script}, TimeoutSecs: forkd.Seconds(secs)}
	}
	for _, c := range []struct {
		name  string
		req   forkd.ExecRequest
		check func(forkd.ExecResult) bool
	}{
		{"missing program", forkd.ExecRequest{Args: []string{"no-such-program"}}, func(r forkd.ExecResult) bool {
			return r.ExitCode == 127 && strings.Contains(r.Stderr, "no-such-program")
		}},
		{"exit code and both streams", shell("echo out; echo err >&2; exit 3", 10), func(r forkd.ExecResult) bool {
			return r.ExitCode == 3 && r.Stdout == "out\n" && r.Stderr == "err\n"
		}},
		{"signal", shell("kill -SEGV $$", 10), func(r forkd.ExecResult) bool { return r.ExitCode == 139 && r.Signal == 11 }},
		{"time-out", shell("echo begun; sleep 1000", 1), func(r forkd.ExecResult) bool { return r.TimedOut && r.Stdout == "begun\n" }},
		{"100 MB of output", shell("head -c 100000000 /dev/zero | tr '\\0' x", 120), func(r forkd.ExecResult) bool {
			return r.ExitCode == 0 && r.Truncated && len(r.Stdout) == 8<<20 && strings.Trim(r.Stdout, "x") == ""
		}},
		{"invalid UTF-8", shell(`printf 'a\377\376b\000c'`, 10), func(r forkd.ExecResult) bool {
			return bytes.Equal(r.StdoutBytes(), []byte("a\xff\xfeb\x00c")) && strings.HasPrefix(r.Stdout, "a\uFFFD")
		}},
		{"background child that keeps stdout open", shell("sleep 1000 & echo done", 20), func(r forkd.ExecResult) bool {
			return r.ExitCode == 0 && r.Stdout == "done\n" && !r.TimedOut
		}},
		{"no input is end of input", shell("cat; echo end", 10), func(r forkd.ExecResult) bool { return r.Stdout == "end\n" }},
	} {
		res, err := w.client.Exec(t.Context(), sb, c.req)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if !c.check(res) {
			t.Errorf("%s: %s", c.name, brief(res))
		}
		w.answers(t, sb)
	}
	got := w.cli(t, "exec", sb, "--", "no-such-program")
	if got.code != 127 || !strings.Contains(got.stderr, "no-such-program") {
		t.Errorf("missing program by command line: %+v", got)
	}
}

// brief is a result without its megabytes.
func brief[T forkd.ExecResult | forkd.EvalResult](res T) string {
	s := fmt.Sprintf("%+v", res)
	if len(s) > 600 {
		return fmt.Sprintf("%s ... (%d bytes)", s[:600], len(s))
	}
	return s
}

// TestHardEvals does the same to the warm interpreter.
func TestHardEvals(t *testing.T) {
	w := running(t)
	sb := w.fork(t, "py-base", 1)[0].ID
	errorHas := func(part string) func(forkd.EvalResult) bool {
		return func(r forkd.EvalResult) bool {
			return r.Error != nil && r.ExitCode == 1 && strings.Contains(*r.Error+r.Traceback, part)
		}
	}
	result := func(want string) func(forkd.EvalResult) bool {
		return func(r forkd.EvalResult) bool { return r.Error == nil && r.Result != nil && *r.Result == want }
	}
	for _, c := range []struct {
		name, code string
		secs       float64
		check      func(forkd.EvalResult) bool
	}{
		{"syntax error", "def f(:", 30, errorHas("SyntaxError")},
		{"exception", "1/0", 30, errorHas("ZeroDivisionError")},
		{"many statements and a value", "a = 1\nfor i in range(10):\n    a += i\nprint('seen')\na", 30, func(r forkd.EvalResult) bool {
			return result("46")(r) && r.Stdout == "seen\n"
		}},
		{"no value", "a = 2", 30, func(r forkd.EvalResult) bool { return r.Error == nil && r.Result == nil }},
		{"state stays", "a", 30, result("2")},
		{"await at top level", "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 5\nawait f()", 60, result("5")},
		{"infinite loop", "while True: pass", 1, func(r forkd.EvalResult) bool { return r.TimedOut && r.Error != nil }},
		{"state stays after an interrupt", "a", 30, result("2")},
		{"10 MB string", "'y' * 10_000_000", 60, func(r forkd.EvalResult) bool {
			return r.Error == nil && r.Truncated && r.Result != nil && len(*r.Result) == 8<<20
		}},
		{"invalid UTF-8", "import os; os.write(1, b'\\xff\\xfe') and None", 30, func(r forkd.EvalResult) bool {
			return r.Error == nil && bytes.Equal(r.StdoutBytes(), []byte("\xff\xfe"))
		}},
		{"interpreter ends itself", "import os; os._exit(1)", 30, func(r forkd.EvalResult) bool { return r.Error != nil && r.RunnerRestarted }},
		{"fresh interpreter is warm", "numpy.__name__", 60, result("'numpy'")},
		{"interpreter kills itself", "import os; os.kill(os.getpid(), 9)", 30, func(r forkd.EvalResult) bool { return r.Error != nil && r.RunnerRestarted }},
		{"sys.exit", "import sys; sys.exit(3)", 60, errorHas("SystemExit")},
		{"deep recursion", "def g(): g()\ng()", 60, errorHas("RecursionError")},
		{"input from nobody", "input()", 60, errorHas("EOFError")},
	} {
		res, err := w.client.Eval(t.Context(), sb, forkd.EvalRequest{Code: c.code, TimeoutSecs: forkd.Seconds(c.secs)})
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		} else if !c.check(res) {
			t.Errorf("%s: error %s, result %.80s: %s", c.name, text(res.Error), text(res.Result), brief(res))
		}
		w.answers(t, sb)
	}
	for code, want := range map[string]outcome{
		"1/0":        {1, "", "ZeroDivisionError"},
		"print('x')": {0, "x\n", ""},
		"6*7":        {0, "42\n", ""},
	} {
		got := w.cli(t, "eval", sb, code)
		if got.code != want.code || got.stdout != want.stdout || !strings.Contains(got.stderr, want.stderr) {
			t.Errorf("eval %s by command line: %+v", code, got)
		}
	}
}

// TestImageWithoutPython: what needs no Python works, eval says what is missing.
func TestImageWithoutPython(t *testing.T) {
	w := running(t)
	if w.keep {
		w.cli(t, "snapshot", "rm", "bare")
		w.cli(t, "image", "rm", "bare")
	}
	im := decoded[forkd.Image](t, w, "image", "build", "--tag", "bare", "busybox")
	t.Cleanup(func() { w.cli(t, "image", "rm", "bare") })
	w.snapshot(t, "bare", "--image", "bare", "--exec", "echo made > /root/made")
	sb := w.fork(t, "bare", 1)[0]
	if got := w.exec(t, sb.ID, "cat /root/made; busybox echo hi; hostname"); got != "made\nhi\n"+sb.ID+"\n" {
		t.Errorf("exec: %q", got)
	}
	status, e := w.refused(t, "POST", "/v1/sandboxes/"+sb.ID+"/eval", `{"code":"1"}`)
	if status != 400 || e.Code != "unsupported" || !strings.Contains(strings.ToLower(e.Error), "python") || e.Hint == "" {
		t.Errorf("eval without Python: %d %+v", status, e)
	}
	if got := w.cli(t, "eval", sb.ID, "1"); got.code != 1 || !strings.Contains(got.stderr, "python") {
		t.Errorf("eval without Python by command line: %+v", got)
	}
	if got := w.cli(t, "snapshot", "--tag", "x", "--from", "bare", "--warm", "1"); got.code != 1 {
		t.Errorf("warm-up without Python: %+v", got)
	}
	if got := w.cli(t, "image", "rm", im.ID); got.code != 1 || !strings.Contains(got.stderr, "used by") {
		t.Errorf("remove an image in use: %+v", got)
	}
	w.exec(t, sb.ID, "true")
}
