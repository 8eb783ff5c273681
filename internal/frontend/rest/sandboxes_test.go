package rest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

// TestUpstreamFields proves that what the published SDKs read is there.
func TestUpstreamFields(t *testing.T) {
	r := newRig(t, nil)
	id := r.fork()
	sb := "/v1/sandboxes/" + id
	for _, c := range []struct {
		method, path, body string
		list               bool
		keys               string
	}{
		{"GET", sb, "", false, "id snapshot_tag netns guest_addr created_at_unix pid memory_limit_mib has_branched last_branch_memory_path branch_count"},
		{"GET", "/v1/sandboxes", "", true, "id snapshot_tag netns guest_addr created_at_unix pid memory_limit_mib has_branched branch_count"},
		{"GET", "/v1/snapshots", "", true, "tag dir created_at_unix status bootable pause_ms"},
		{"GET", "/v1/snapshots/py-base/info", "", false, "tag dir created_at_unix memory_logical_bytes memory_physical_bytes vmstate_bytes chain_depth dependents ancestors"},
		{"POST", sb + "/ping", "", false, "pong numpy_version pid agent_lang warmup_ready"},
		{"POST", sb + "/exec", `{"args":["true"],"timeout_secs":30}`, false, "stdout stderr exit_code"},
		{"POST", sb + "/eval", `{"code":"1+1"}`, false, "result error exit_code"},
	} {
		a := r.do(c.method, c.path, c.body)
		var got map[string]any
		if c.list {
			got = into[[]map[string]any](t, a)[0]
		} else {
			got = into[map[string]any](t, a)
		}
		for key := range strings.FieldsSeq(c.keys) {
			if _, ok := got[key]; !ok {
				t.Errorf("%s %s: no %q in %s", c.method, c.path, key, a.body)
			}
		}
	}
}

func TestSandboxLife(t *testing.T) {
	r := newRig(t, nil)
	if a := r.do("GET", "/v1/sandboxes", ""); a.body != "[]\n" {
		t.Errorf("empty list is %q", a.body)
	}
	a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":3,"per_child_netns":true,"prewarm":true,"live_fork":false,"unknown":1,"memory_limit_mib":700}`)
	list := into[[]api.Sandbox](t, a)
	if a.status != http.StatusCreated || len(list) != 3 {
		t.Fatalf("create: %d %s", a.status, a.body)
	}
	one := into[api.Sandbox](t, r.do("GET", "/v1/sandboxes/"+list[1].ID, ""))
	if one.SnapshotTag != "py-base" || one.State != "running" || *one.MemoryLimitMiB != 700 || one.Usage == nil || one.Usage.PSSKiB != 24<<10 {
		t.Errorf("get: %+v", one)
	}
	if a := r.do("DELETE", "/v1/sandboxes/"+one.ID, ""); a.status != http.StatusNoContent || a.body != "" {
		t.Errorf("delete: %d %q", a.status, a.body)
	}
	if a := r.do("DELETE", "/v1/sandboxes/"+one.ID, ""); a.status != http.StatusNotFound {
		t.Errorf("second delete: %d", a.status)
	}
}

func TestForkFailures(t *testing.T) {
	r := newRig(t, nil)
	r.svc.FailChild = map[int]error{1: errdefs.New(errdefs.ErrGuest, "agent is silent")}
	a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":3}`)
	if a.status != http.StatusBadGateway || len(r.svc.Living()) != 0 {
		t.Errorf("all or nothing: %d %s, %d left", a.status, a.body, len(r.svc.Living()))
	}
	a = r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":3,"partial":true}`)
	got := into[[]map[string]any](t, a)
	if a.status != http.StatusCreated || len(got) != 3 || got[1]["index"] != 1.0 || got[1]["code"] != "guest_failure" || got[2]["id"] == nil {
		t.Errorf("partial: %d %s", a.status, a.body)
	}
}

// lines splits an NDJSON answer.
func lines(t *testing.T, a answer) []api.ForkLine {
	t.Helper()
	if got := a.header.Get("Content-Type"); got != api.NDJSON {
		t.Fatalf("Content-Type %q of %s", got, a.body)
	}
	var out []api.ForkLine
	scan := bufio.NewScanner(strings.NewReader(a.body))
	for scan.Scan() {
		var l api.ForkLine
		if err := json.Unmarshal(scan.Bytes(), &l); err != nil {
			t.Fatalf("line %q: %v", scan.Text(), err)
		}
		out = append(out, l)
	}
	return out
}

func TestForkStream(t *testing.T) {
	r := newRig(t, nil)
	r.svc.OnFork = func(_ context.Context, f sandbox.Fork) error {
		f.Progress("building py-base", 0.25)
		return nil
	}
	r.svc.FailChild = map[int]error{0: errdefs.New(errdefs.ErrTimeout, "too slow")}
	got := lines(t, r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":2,"partial":true}`, "Accept: application/x-ndjson"))
	if len(got) != 4 || got[0].Progress.Step != "building py-base" || got[1].Code != "timeout" || *got[1].Index != 0 ||
		got[2].Sandbox == nil || *got[2].Index != 1 || !got[3].Done || *got[3].OK != 1 || *got[3].Failed != 1 {
		t.Errorf("partial stream: %+v", got)
	}
	got = lines(t, r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":2}`, "Accept: text/html, application/x-ndjson;q=0.9"))
	last := got[len(got)-1]
	if !last.Done || last.Code != "timeout" || *last.OK != 0 || *last.Failed != 2 {
		t.Errorf("failed stream ends with %+v", last)
	}
	// An error that comes before the first line has its own status.
	a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"absent"}`, "Accept: application/x-ndjson")
	if a.status != http.StatusNotFound {
		t.Errorf("early error: %d %s", a.status, a.body)
	}
}

// TestForkIsCanceledByItsClient closes the connection in the middle of a fork.
func TestForkIsCanceledByItsClient(t *testing.T) {
	r := newRig(t, nil)
	begun, ended := make(chan struct{}), make(chan error, 1)
	r.svc.OnFork = func(ctx context.Context, _ sandbox.Fork) error {
		close(begun)
		<-ctx.Done()
		ended <- ctx.Err()
		return ctx.Err()
	}
	ctx, cancel := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, "POST", r.url+"/v1/sandboxes", strings.NewReader(`{"snapshot_tag":"py-base"}`))
	req.Header.Set("Content-Type", api.JSON)
	done := make(chan error, 1)
	go func() {
		res, err := http.DefaultClient.Do(req)
		if err == nil {
			res.Body.Close()
		}
		done <- err
	}()
	<-begun
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("client got %v", err)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("service saw %v", err)
	}
}

// TestAbandonedChildrenAreKilled: the children came up, but nobody learns their ids.
func TestAbandonedChildrenAreKilled(t *testing.T) {
	r := newRig(t, nil)
	id := r.fork()
	s := &server{svc: r.svc, log: newServerLog()}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	req, _ := http.NewRequestWithContext(ctx, "POST", "/v1/sandboxes", nil)
	s.abandon(req, []sandbox.ForkItem{{Sandbox: sandbox.Sandbox{ID: id}}, {Index: 1, Err: errdefs.ErrGuest}, {Sandbox: sandbox.Sandbox{ID: "sb00000000000000000099"}}})
	if left := r.svc.Living(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestExec(t *testing.T) {
	r := newRig(t, nil)
	path := "/v1/sandboxes/" + r.fork() + "/exec"
	var seen agentwire.ExecRequest
	var next agentwire.ExecResult
	r.svc.OnExec = func(_ context.Context, _ string, q agentwire.ExecRequest) (agentwire.ExecResult, error) {
		seen = q
		return next, nil
	}
	next = agentwire.ExecResult{ExitCode: 139, Signal: 11, Stdout: []byte("ok\xff"), Stderr: []byte("<é>"), StderrTruncated: true, MaxRSSKiB: 5}
	a := r.do("POST", path, `{"args":["sh","-c","x"],"timeout_secs":1.5,"env":{"A":"b"},"cwd":"/tmp","user":"nobody","stdin":"in","output_limit":10}`)
	got := into[api.ExecResult](t, a)
	if got.ExitCode != 139 || got.Signal != 11 || got.Stdout != "ok\uFFFD" || string(got.StdoutBytes()) != "ok\xff" || !got.Truncated ||
		got.Stderr != "<é>" || got.StderrBase64 != nil || !strings.Contains(a.body, `"<é>"`) {
		t.Errorf("answer: %s", a.body)
	}
	if !slices.Equal(seen.Argv, []string{"sh", "-c", "x"}) || seen.Timeout.Milliseconds() != 1500 || seen.Env["A"] != "b" ||
		seen.Cwd != "/tmp" || seen.User != "nobody" || string(seen.Stdin) != "in" || seen.OutputLimit != 10 {
		t.Errorf("request: %+v", seen)
	}
	r.do("POST", path, `{"args":["x"],"stdin_base64":"AP8="}`)
	if string(seen.Stdin) != "\x00\xff" || seen.Timeout != agentwire.DefaultExecTimeout {
		t.Errorf("request: %+v", seen)
	}
}

func TestExecOfMissingProgram(t *testing.T) {
	r := newRig(t, nil)
	a := r.do("POST", "/v1/sandboxes/"+r.fork()+"/exec", `{"args":["missing"]}`)
	got := into[api.ExecResult](t, a)
	if a.status != 200 || got.ExitCode != 127 || !strings.Contains(got.Stderr, "missing") {
		t.Errorf("got %d %s", a.status, a.body)
	}
}

func TestEval(t *testing.T) {
	r := newRig(t, nil)
	path := "/v1/sandboxes/" + r.fork() + "/eval"
	for _, c := range []struct {
		next agentwire.EvalResult
		want string // of the answer
	}{
		{agentwire.EvalResult{HasResult: true, Result: "2"}, `"result":"2","error":null,"exit_code":0`},
		{agentwire.EvalResult{}, `"result":null,"error":null,"exit_code":0`},
		{agentwire.EvalResult{Error: "ValueError: x", Traceback: "tb"}, `"result":null,"error":"ValueError: x","exit_code":1`},
		{agentwire.EvalResult{Error: "timed out", TimedOut: true, RunnerRestarted: true}, `"timed_out":true,"truncated":false,"runner_restarted":true`},
		{agentwire.EvalResult{ResultTruncated: true, HasResult: true, Result: "\xff"}, "\"result\":\"\uFFFD\""},
	} {
		r.svc.OnEval = func(context.Context, string, agentwire.EvalRequest) (agentwire.EvalResult, error) { return c.next, nil }
		if a := r.do("POST", path, `{"code":""}`); a.status != 200 || !strings.Contains(a.body, c.want) {
			t.Errorf("%+v: got %d %s, want %s", c.next, a.status, a.body, c.want)
		}
	}
}
