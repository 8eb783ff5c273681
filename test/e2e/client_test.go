package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/api/rest"
	forkd "forkd.dev/forkd/sdk/go"
)

// callPatience bounds one command or request.
const callPatience = 3 * time.Minute

// outcome is how a command ended.
type outcome struct {
	code           int
	stdout, stderr string
}

// cli runs the command line.
func (w *world) cli(t *testing.T, args ...string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), callPatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, w.bin, args...)
	cmd.Env = w.env()
	return finish(t, cmd)
}

// finish runs cmd to its end.
func finish(t *testing.T, cmd *exec.Cmd) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %v: %v", cmd, err)
	}
	return outcome{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// must runs the command line, which has to succeed, and returns its output.
func (w *world) must(t *testing.T, args ...string) string {
	t.Helper()
	got := w.cli(t, args...)
	if got.code != 0 {
		t.Fatalf("forkd %s: exit code %d\n%s%s", strings.Join(args, " "), got.code, got.stdout, got.stderr)
	}
	return got.stdout
}

// decoded runs the command line with --json and decodes what it prints.
func decoded[T any](t *testing.T, w *world, args ...string) T {
	t.Helper()
	var v T
	text := w.must(t, append(args, "--json")...)
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("forkd %s printed %.300q: %v", strings.Join(args, " "), text, err)
	}
	return v
}

// fork makes n sandboxes of a snapshot by the Go client.
func (w *world) fork(t *testing.T, tag string, n int) []forkd.Sandbox {
	t.Helper()
	return w.forkAs(t, forkd.ForkRequest{SnapshotTag: tag, N: forkd.Int(n)})
}

func (w *world) forkAs(t *testing.T, req forkd.ForkRequest) []forkd.Sandbox {
	t.Helper()
	res, err := w.client.Fork(t.Context(), req, nil)
	if err != nil {
		t.Fatalf("fork %s: %v", req.SnapshotTag, err)
	}
	return res.Sandboxes
}

// snapshot makes a snapshot by the command line; it goes with the test.
func (w *world) snapshot(t *testing.T, tag string, args ...string) forkd.Snapshot {
	t.Helper()
	if w.keep {
		w.cli(t, "snapshot", "rm", "--cascade", tag) // of an earlier run on the kept directory
	}
	sn := decoded[forkd.Snapshot](t, w, append([]string{"snapshot", "--tag", tag}, args...)...)
	t.Cleanup(func() {
		w.killAll(t)
		if got := w.cli(t, "snapshot", "rm", "--cascade", sn.ID); got.code != 0 && got.code != 3 {
			t.Errorf("remove snapshot %s: %+v", tag, got)
		}
	})
	return sn
}

// eval evaluates code that has to succeed and returns the value's repr.
func (w *world) eval(t *testing.T, id, code string) string {
	t.Helper()
	res, err := w.client.Eval(t.Context(), id, forkd.EvalRequest{Code: code})
	if err != nil {
		t.Fatalf("eval in %s: %v", id, err)
	}
	if res.Error != nil || res.Result == nil {
		t.Fatalf("eval in %s: %s\n%s%s", id, text(res.Error), res.Stderr, res.Traceback)
	}
	return *res.Result
}

// exec runs a shell command that has to succeed and returns its output.
func (w *world) exec(t *testing.T, id, script string) string {
	t.Helper()
	res, err := w.client.Exec(t.Context(), id, forkd.ExecRequest{Args: []string{"sh", "-c", script}})
	if err != nil {
		t.Fatalf("exec in %s: %v", id, err)
	}
	if res.ExitCode != 0 {
		t.Fatalf("exec in %s: %q ended with %d: %s%s", id, script, res.ExitCode, res.Stdout, res.Stderr)
	}
	return res.Stdout
}

// answers fails the test unless a sandbox still does what it is asked.
func (w *world) answers(t *testing.T, id string) {
	t.Helper()
	if got := w.eval(t, id, "6*7"); got != "42" {
		t.Errorf("6*7 in %s is %q", id, got)
	}
	if got := w.exec(t, id, "echo alive"); got != "alive\n" {
		t.Errorf("echo in %s printed %q", id, got)
	}
}

func text(s *string) string {
	if s == nil {
		return "none"
	}
	return *s
}

// each calls work for every sandbox, four at a time.
func each(t *testing.T, list []forkd.Sandbox, work func(i int, sb forkd.Sandbox) error) {
	t.Helper()
	var g errgroup.Group
	g.SetLimit(4)
	for i, sb := range list {
		g.Go(func() error { return work(i, sb) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

// request makes a raw request to the daemon; accept may be "".
func (w *world) request(ctx context.Context, t *testing.T, method, path, body, accept string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, w.url()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", rest.JSON)
	}
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	return res
}

// refused makes a request that has to fail and returns the error's body.
func (w *world) refused(t *testing.T, method, path, body string) (int, rest.Error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), callPatience)
	defer cancel()
	res := w.request(ctx, t, method, path, body, "")
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	var e rest.Error
	if err := json.Unmarshal(raw, &e); err != nil {
		t.Errorf("%s %s: body %.200q: %v", method, path, raw, err)
	}
	return res.StatusCode, e
}

// requestAs lists sandboxes with one header set, Host included.
func (w *world) requestAs(t *testing.T, header, value string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url()+"/v1/sandboxes", nil)
	if err != nil {
		t.Fatal(err)
	}
	if header == "Host" {
		req.Host = value
	} else {
		req.Header.Set(header, value)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(raw)
}
