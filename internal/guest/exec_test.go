package guest

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

func TestPing(t *testing.T) {
	c := newClient(t)
	p, err := c.Ping(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	if p.ProtocolVersion != agentwire.Version || p.PID <= 0 || p.WarmupReady || time.Since(p.WallClock).Abs() > time.Minute {
		t.Fatalf("pong %+v", p)
	}
}

func TestExecResults(t *testing.T) {
	c := newClient(t)
	res := mustExec(t, c, "sh", "-c", "echo out; echo err >&2; exit 3")
	if res.ExitCode != 3 || string(res.Stdout) != "out\n" || string(res.Stderr) != "err\n" || res.MaxRSSKiB == 0 || res.Duration <= 0 {
		t.Fatalf("result %+v", res)
	}
	if res := mustExec(t, c, "sh", "-c", "kill -9 $$"); res.Signal != 9 || res.ExitCode != 137 {
		t.Fatalf("killed: %+v", res)
	}
	raw := "\xff\xfe\x00ok"
	if res := mustExec(t, c, "printf", `\377\376\000ok`); string(res.Stdout) != raw {
		t.Fatalf("bytes %q, want %q", res.Stdout, raw)
	}
	if res := mustExec(t, c, "cat"); len(res.Stdout) != 0 || res.ExitCode != 0 {
		t.Fatalf("no stdin is not the end of input: %+v", res)
	}
	// Each line of a program's real-time scheduling would be visible here.
	if res := mustExec(t, c, "cat", "/proc/self/oom_score_adj"); string(res.Stdout) != "0\n" {
		t.Fatalf("oom_score_adj %q", res.Stdout)
	}
}

func TestExecRequestFields(t *testing.T) {
	c := newClient(t)
	stdin := bytes.Repeat([]byte("0123456789abcdef"), 200<<10/16*16)
	res, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"wc", "-c"}, Stdin: stdin})
	if err != nil || strings.TrimSpace(string(res.Stdout)) != "3276800" {
		t.Fatalf("stdin: %q %v", res.Stdout, err)
	}
	res, err = c.Exec(testContext(t), agentwire.ExecRequest{
		Argv: []string{"sh", "-c", "pwd; echo $X $LANG; id -u; id -g"}, Cwd: "/usr", Env: map[string]string{"X": "y z"}, User: "65534:65533",
	})
	if want := "/usr\ny z C.UTF-8\n65534\n65533\n"; err != nil || string(res.Stdout) != want {
		t.Fatalf("got %q %q, want %q: %v", res.Stdout, res.Stderr, want, err)
	}
	// A program need not read its input.
	if _, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"true"}, Stdin: stdin}); err != nil {
		t.Fatal(err)
	}
}

func TestExecErrors(t *testing.T) {
	c := newClient(t)
	for name, tc := range map[string]struct {
		m     agentwire.ExecRequest
		class error
		text  string
	}{
		"missing program":    {agentwire.ExecRequest{Argv: []string{"no-such-program"}}, errdefs.ErrNotFound, "no-such-program"},
		"missing path":       {agentwire.ExecRequest{Argv: []string{"/no/such"}}, errdefs.ErrNotFound, "/no/such"},
		"not executable":     {agentwire.ExecRequest{Argv: []string{"/etc/passwd"}}, errdefs.ErrPermission, "/etc/passwd"},
		"no program":         {agentwire.ExecRequest{}, errdefs.ErrInvalid, "without"},
		"NUL":                {agentwire.ExecRequest{Argv: []string{"echo", "a\x00b"}}, errdefs.ErrInvalid, "NUL"},
		"missing cwd":        {agentwire.ExecRequest{Argv: []string{"true"}, Cwd: "/no/such/dir"}, errdefs.ErrInvalid, "/no/such/dir"},
		"unknown user":       {agentwire.ExecRequest{Argv: []string{"true"}, User: "nobody-such"}, errdefs.ErrInvalid, "nobody-such"},
		"bad env":            {agentwire.ExecRequest{Argv: []string{"true"}, Env: map[string]string{"a=b": ""}}, errdefs.ErrInvalid, "a=b"},
		"negative timeout":   {agentwire.ExecRequest{Argv: []string{"true"}, Timeout: -1}, errdefs.ErrInvalid, "timeout"},
		"huge output limit":  {agentwire.ExecRequest{Argv: []string{"true"}, OutputLimit: 1 << 30}, errdefs.ErrInvalid, "limit"},
		"request of 33 MiB":  {agentwire.ExecRequest{Argv: []string{"cat"}, Stdin: make([]byte, 33<<20)}, errdefs.ErrInvalid, "exceeds"},
		"missing dot script": {agentwire.ExecRequest{Argv: []string{"./x"}, Cwd: "/usr"}, errdefs.ErrNotFound, "./x"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Exec(testContext(t), tc.m)
			wantClass(t, err, tc.class)
			if !strings.Contains(err.Error(), tc.text) {
				t.Fatalf("error %q does not tell %q", err, tc.text)
			}
		})
	}
	mustExec(t, c, "true")
}

func TestExecOutputOverLimit(t *testing.T) {
	c := newClient(t)
	res := mustExec(t, c, "sh", "-c", "head -c 100000000 /dev/zero; echo done >&2")
	if len(res.Stdout) != agentwire.DefaultOutputLimit || !res.StdoutTruncated || string(res.Stderr) != "done\n" || res.StderrTruncated || res.ExitCode != 0 {
		t.Fatalf("%d bytes, truncated %v, stderr %q, exit %d", len(res.Stdout), res.StdoutTruncated, res.Stderr, res.ExitCode)
	}
	mustExec(t, c, "true")
}

func TestExecTimeoutKillsTheTree(t *testing.T) {
	c := newClient(t)
	res, err := c.Exec(testContext(t), agentwire.ExecRequest{
		Argv: []string{"sh", "-c", "echo partial; sleep 1000 & echo $!; sleep 1000"}, Timeout: 300 * time.Millisecond,
	})
	// The shell may see its child killed, and end by itself, before its own turn comes.
	killed := res.Signal == 9 || res.ExitCode == 128+9
	if err != nil || !res.TimedOut || !killed || !strings.HasPrefix(string(res.Stdout), "partial\n") {
		t.Fatalf("%+v %v", res, err)
	}
	child := strings.Fields(string(res.Stdout))[1]
	awaitGone(t, child)
}

// awaitGone waits until a process has ended; the agent reaps it.
func awaitGone(t *testing.T, pid string) {
	t.Helper()
	ctx := testContext(t)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat("/proc/" + pid); errors.Is(err, fs.ErrNotExist) {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("process %s is still there", pid)
		}
	}
}

func TestExecBackgroundChildDelaysNothing(t *testing.T) {
	c := newClient(t)
	begin := time.Now()
	res := mustExec(t, c, "sh", "-c", "sleep 30 & echo $!; echo started")
	if took := time.Since(begin); took > 5*time.Second || !strings.HasSuffix(string(res.Stdout), "started\n") {
		t.Fatalf("answer %q after %s", res.Stdout, took)
	}
	// One that floods stdout does not keep the answer either.
	res = mustExec(t, c, "sh", "-c", "yes & echo $!")
	if res.ExitCode != 0 {
		t.Fatalf("%+v", res)
	}
	pid := strings.Fields(string(mustExec(t, c, "pgrep", "-n", "sleep").Stdout))
	if len(pid) == 1 {
		mustExec(t, c, "kill", pid[0])
	}
}

func TestExecCancel(t *testing.T) {
	c := newClient(t)
	ctx, cancel := context.WithCancel(testContext(t))
	r := make(chan error, 1)
	marker := t.TempDir() + "/pid"
	go func() {
		_, err := c.Exec(ctx, agentwire.ExecRequest{Argv: []string{"sh", "-c", "echo $$ > " + marker + ".tmp; mv " + marker + ".tmp " + marker + "; exec sleep 1000"}})
		r <- err
	}()
	pid := awaitFile(t, marker)
	cancel()
	wantClass(t, <-r, context.Canceled)
	awaitGone(t, strings.TrimSpace(pid))
	mustExec(t, c, "true")
}

func awaitFile(t *testing.T, path string) string {
	t.Helper()
	ctx := testContext(t)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if b, err := os.ReadFile(path); err == nil {
			return string(b)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s did not appear", path)
		}
	}
}

func TestLargeReplyDoesNotDelayPings(t *testing.T) {
	c := newClient(t)
	done := make(chan error, 1)
	go func() {
		res, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"head", "-c", "64M", "/dev/zero"}, OutputLimit: agentwire.MaxOutputLimit})
		if err == nil && len(res.Stdout) != 64<<20 {
			t.Errorf("%d bytes", len(res.Stdout))
		}
		done <- err
	}()
	pings, worst := 0, time.Duration(0)
	for {
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d pings meanwhile, slowest %s", pings, worst)
			return
		default:
		}
		begin := time.Now()
		if _, err := c.Ping(testContext(t)); err != nil {
			t.Fatal(err)
		}
		pings++
		worst = max(worst, time.Since(begin))
	}
}
