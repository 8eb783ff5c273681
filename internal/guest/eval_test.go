package guest

import (
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

func TestEvalValues(t *testing.T) {
	c := newClient(t)
	for code, want := range map[string]string{
		"1+1":                                 "2",
		"import sys; sys.version_info[0]":     "3",
		"x = 5\nfor i in range(3):\n x+=i\nx": "8",
		"__name__":                            "'__main__'",
		"'\\ud800'":                           `'\ud800'`,
		"input.__name__":                      "'input'",
		"import asyncio\nawait asyncio.sleep(0, 'slept')":                              "'slept'",
		"[await asyncio.sleep(0, i) for i in range(3)]":                                "[0, 1, 2]",
		"import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))).__name__": "'A'",
	} {
		evalTo(t, c, "import asyncio", "")
		evalTo(t, c, code, want)
	}
	if res := mustEval(t, c, "y = 7"); res.HasResult || res.Error != "" {
		t.Fatalf("statement: %+v", res)
	}
	evalTo(t, c, "y", "7")
	if res := mustEval(t, c, "None"); res.HasResult {
		t.Fatalf("None: %+v", res)
	}
	p, err := c.Ping(testContext(t))
	if err != nil || !p.WarmupReady || !strings.HasPrefix(p.PythonVersion, "3.") || len(p.Runners) != 1 {
		t.Fatalf("pong %+v %v", p, err)
	}
}

func TestEvalErrors(t *testing.T) {
	c := newClient(t)
	evalTo(t, c, "kept = 41", "")
	for code, want := range map[string]struct{ err, trace string }{
		"1/0":       {"ZeroDivisionError: division by zero", "1/0"},
		"def f(:\n": {"SyntaxError: invalid syntax", "def f(:"},
		"\n\ndef g():\n  raise ValueError('deep')\ng()": {"ValueError: deep", "line 4, in g"},
		"input()":                 {"EOFError", "input()"},
		"raise SystemExit(3)":     {"SystemExit: 3", ""},
		"exit()":                  {"SystemExit", ""},
		"raise KeyboardInterrupt": {"KeyboardInterrupt", ""},
		"class R:\n def __repr__(s): raise KeyError('r')\nR()":     {"KeyError: 'r'", "__repr__"},
		"'\\0'.encode().decode() + 1":                              {"TypeError", ""},
		"compile('\\0','','exec')":                                 {"", ""},
		"def r(): return r()\nr()":                                 {"RecursionError", ""},
		"import no_such_module":                                    {"ModuleNotFoundError", "no_such_module"},
		"raise type('E',(Exception,),{'__str__':lambda s: 1/0})()": {"E", ""},
	} {
		res := mustEval(t, c, code)
		if res.Error == "" || !strings.HasPrefix(res.Error, want.err) || !strings.Contains(res.Traceback, want.trace) || res.RunnerRestarted || res.HasResult {
			t.Errorf("eval %q: %+v", code, res)
		}
		if strings.Contains(res.Traceback, "<forkd>") {
			t.Errorf("eval %q shows the runner's frames:\n%s", code, res.Traceback)
		}
	}
	evalTo(t, c, "kept", "41")
}

func TestEvalOutput(t *testing.T) {
	c := newClient(t)
	res := mustEval(t, c, "import sys, os, subprocess\nprint('out'); print('err', file=sys.stderr); os.write(1, b'\\xff\\xfe'); subprocess.run(['echo','child'])")
	if string(res.Stdout) != "out\n\xff\xfechild\n" || string(res.Stderr) != "err\n" {
		t.Fatalf("%q %q", res.Stdout, res.Stderr)
	}
	if res := mustEval(t, c, "1"); len(res.Stdout)+len(res.Stderr) != 0 {
		t.Fatalf("output of an earlier eval: %+v", res)
	}
	res, err := c.Eval(testContext(t), agentwire.EvalRequest{Code: "print('é' * 100000); 'é' * 100000", OutputLimit: 1000})
	if err != nil || !res.StdoutTruncated || len(res.Stdout) != 1000 || !res.ResultTruncated || len(res.Result) > 1000 || !strings.HasSuffix(res.Result, "é") {
		t.Fatalf("%d %d %v %v", len(res.Stdout), len(res.Result), res.StdoutTruncated, err)
	}
	if res := mustEval(t, c, "'x' * 100_000_000"); !res.ResultTruncated || len(res.Result) != agentwire.DefaultOutputLimit {
		t.Fatalf("huge result of %d bytes, truncated %v", len(res.Result), res.ResultTruncated)
	}
	evalTo(t, c, "2", "2")
}

func TestEvalTimeout(t *testing.T) {
	c := newClient(t)
	evalTo(t, c, "import asyncio, signal\nz = 1", "")
	// On a busy host a short time can be over before the code has begun.
	timedOut := func(code string, enough func(agentwire.EvalResult) bool) (res agentwire.EvalResult, err error) {
		for limit := 200 * time.Millisecond; limit < 10*time.Second; limit *= 2 {
			res, err = c.Eval(testContext(t), agentwire.EvalRequest{Code: code, Timeout: limit})
			if err != nil || !res.TimedOut || enough(res) {
				break
			}
		}
		return res, err
	}
	res, err := timedOut("print('begun')\nwhile True: pass", func(r agentwire.EvalResult) bool { return strings.Contains(r.Traceback, "while True") })
	if err != nil || !res.TimedOut || res.Error == "" || res.RunnerRestarted || string(res.Stdout) != "begun\n" || !strings.Contains(res.Traceback, "while True") {
		t.Fatalf("%+v %v", res, err)
	}
	evalTo(t, c, "z", "1")
	res, err = c.Eval(testContext(t), agentwire.EvalRequest{Code: "await asyncio.sleep(1000)", Timeout: 200 * time.Millisecond})
	if err != nil || !res.TimedOut || res.RunnerRestarted {
		t.Fatalf("await: %+v %v", res, err)
	}
	evalTo(t, c, "await asyncio.sleep(0, z)", "1")
	res, err = timedOut("signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", func(r agentwire.EvalResult) bool { return r.RunnerRestarted })
	if err != nil || !res.TimedOut || !res.RunnerRestarted {
		t.Fatalf("stubborn: %+v %v", res, err)
	}
	if res := mustEval(t, c, "z"); !strings.HasPrefix(res.Error, "NameError") {
		t.Fatalf("state outlived the runner: %+v", res)
	}
}

func TestInterrupt(t *testing.T) {
	c := newClient(t)
	if err := c.Interrupt(testContext(t), ""); err != nil {
		t.Fatal(err)
	}
	evalTo(t, c, "w = 2", "")
	marker := t.TempDir() + "/go"
	r := make(chan agentwire.EvalResult, 1)
	go func() {
		res, err := c.Eval(testContext(t), agentwire.EvalRequest{Code: "open(" + quote(marker) + ",'w').close()\nimport time\ntime.sleep(1000)"})
		if err != nil {
			t.Error(err)
		}
		r <- res
	}()
	awaitFile(t, marker)
	if err := c.Interrupt(testContext(t), "python"); err != nil {
		t.Fatal(err)
	}
	if res := <-r; res.Error != "KeyboardInterrupt" || res.TimedOut || res.RunnerRestarted {
		t.Fatalf("%+v", res)
	}
	evalTo(t, c, "w", "2")
}

func quote(s string) string { return "'" + s + "'" }

func TestRunnerDeath(t *testing.T) {
	c := newClient(t)
	res, err := c.WarmStart(testContext(t), "", "warm = 'yes'\nprint('warming')")
	if err != nil || res.Error != "" || string(res.Stdout) != "warming\n" {
		t.Fatalf("%+v %v", res, err)
	}
	evalTo(t, c, "own = 1; warm", "'yes'")
	for code, want := range map[string]string{
		"print('bye', flush=True)\nimport os; os._exit(1)":   "exit code 1",
		"import os, signal; os.kill(os.getpid(), 11)":        "signal 11",
		"import os\nos.write(4, b'\\xff\\xff\\xff\\xff')\n1": "broke its protocol",
	} {
		res := mustEval(t, c, code)
		if !res.RunnerRestarted || !strings.Contains(res.Error, want) {
			t.Fatalf("eval %q: %+v", code, res)
		}
		evalTo(t, c, "warm", "'yes'")
		if res := mustEval(t, c, "own"); !strings.HasPrefix(res.Error, "NameError") {
			t.Fatalf("after %q: %+v", code, res)
		}
	}
	// A child that comes out of an eval is not a second runner.
	res = mustEval(t, c, "import os\npid = os.fork()\npid == 0")
	if res.Result != "False" {
		t.Fatalf("fork: %+v", res)
	}
	evalTo(t, c, "os.waitpid(pid, 0)[1]", "0")
	// One that dies between two evals is replaced, and the next eval says so.
	mustEval(t, c, "own = 2\nimport threading, os\nthreading.Timer(0.05, os._exit, (7,)).start()")
	for mustPing(t, c).WarmupReady {
	}
	if res := mustEval(t, c, "warm"); !res.RunnerRestarted || res.Result != "'yes'" {
		t.Fatalf("%+v", res)
	}
}

func mustPing(t *testing.T, c *Client) agentwire.Pong {
	t.Helper()
	p, err := c.Ping(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRunnerExtras(t *testing.T) {
	c := newClient(t)
	evalTo(t, c, "import threading, subprocess\ne = threading.Event()\nth = threading.Thread(target=e.wait); th.start()\np = subprocess.Popen(['sleep','1000'])", "")
	if p := mustPing(t, c); p.Threads != 1 || p.Children != 1 {
		t.Fatalf("%+v", p)
	}
	evalTo(t, c, "e.set(); th.join(); p.kill(); p.wait()", "-9")
	if p := mustPing(t, c); p.Threads != 0 || p.Children != 0 {
		t.Fatalf("%+v", p)
	}
}

func TestUnknownLanguage(t *testing.T) {
	c := newClient(t)
	_, err := c.Eval(testContext(t), agentwire.EvalRequest{Language: "cobol", Code: "x"})
	wantClass(t, err, errdefs.ErrUnsupported)
}

func TestEvalsQueue(t *testing.T) {
	c := newClient(t)
	evalTo(t, c, "n = 0", "")
	errs := make(chan error, 20)
	for range cap(errs) {
		go func() {
			_, err := c.Eval(testContext(t), agentwire.EvalRequest{Code: "m = n\nimport time; time.sleep(0.001)\nn = m + 1"})
			errs <- err
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	evalTo(t, c, "n", "20")
}
