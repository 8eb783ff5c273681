package e2e

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/api/rest"
)

// TestRefusedByCommandLine: bad input ends with the exit code of its class and
// says what to do where there is something to do; nothing is printed as a result.
func TestRefusedByCommandLine(t *testing.T) {
	w := running(t)
	sb := w.fork(t, "py-base", 1)[0].ID
	for _, c := range []struct {
		code int
		hint bool
		args []string
	}{
		{2, false, []string{"fork", "--tag", "py-base", "-n", "0"}},
		{2, false, []string{"fork", "--tag", "py-base", "-n", "-1"}},
		{2, false, []string{"fork", "--tag", "py-base", "-n", "100000"}},
		{2, false, []string{"fork", "--tag", "../../etc"}},
		{2, true, []string{"fork", "--tag", "py-base", "--engine", "xen"}},
		{2, true, []string{"fork", "--tag", "py-base", "--memory", "1G"}},
		{2, true, []string{"fork", "--tag", "py-base", "--cpus", "8"}},
		{2, false, []string{"fork", "--tag", "py-base", "-n", "2", "--name", "one"}},
		{2, true, []string{"fork", "--tag", "py-base", "--name", "../x"}},
		{3, true, []string{"fork", "--tag", "no-such-tag"}},
		{3, true, []string{"fork", "--tag", "sn00000000000000000000"}},
		{3, true, []string{"eval", "sb00000000000000000000", "1"}},
		{3, true, []string{"kill", "sb00000000000000000000"}},
		{125, true, []string{"exec", "sb00000000000000000000", "--", "true"}},
		{2, false, []string{"eval", "../../etc", "1"}},
		{2, true, []string{"snapshot", "--tag", "../../etc"}},
		{3, true, []string{"snapshot", "--tag", "x", "--image", "no-such-image"}},
		{3, true, []string{"snapshot", "--tag", "x", "--from", "no-such-tag"}},
		{2, false, []string{"snapshot", "--tag", "x", "--image", "python", "--from", "py-base"}},
		{1, true, []string{"snapshot", "--tag", "py-base"}},
		{2, false, []string{"snapshot", "--tag", "x", "--exec", "echo why >&2; exit 7"}},
		{2, false, []string{"snapshot", "--tag", "x", "--warm", "1/0"}},
		{2, false, []string{"image", "build", "--tag", "x", "../../etc"}},
		{2, false, []string{"image", "build", "--tag", "x", "--", "-o", "Dir::Etc=/"}},
		{2, true, []string{"serve", "--engine", "xen", "--data-dir", filepath.Join(w.dir, "unused"), "--bind", "127.0.0.1:0"}},
		{2, true, []string{"serve", "--bind", "0.0.0.0:0", "--data-dir", filepath.Join(w.dir, "unused")}},
	} {
		got := w.cli(t, c.args...)
		name := strings.Join(c.args, " ")
		if got.code != c.code || got.stdout != "" {
			t.Errorf("%s: exit code %d, want %d; %q, %q", name, got.code, c.code, got.stdout, got.stderr)
		}
		if hint := strings.Contains(got.stderr, "hint: "); hint != c.hint && c.hint {
			t.Errorf("%s: no hint: %q", name, got.stderr)
		}
		if !strings.Contains(got.stderr, "forkd: ") || strings.Contains(got.stderr, "panic") {
			t.Errorf("%s: %q", name, got.stderr)
		}
	}
	w.answers(t, sb)
	if list := strings.Fields(w.must(t, "ls", "-q")); len(list) != 1 || list[0] != sb {
		t.Errorf("refused commands left %v", list)
	}
}

// TestRefusedByREST: bad requests answer with the status and code of their class.
func TestRefusedByREST(t *testing.T) {
	w := running(t)
	sb := w.fork(t, "py-base", 1)[0].ID
	for _, c := range []struct {
		method, path, body string
		status             int
		code               string
	}{
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":0}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":-1}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":100000}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":1e99}`, 422, "invalid_argument"},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"../../etc"}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"no-such-tag"}`, 404, "not_found"},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","engine":"xen"}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","live_fork":true}`, 400, "unsupported"},
		{"POST", "/v1/sandboxes", `{"n":1}`, 422, "invalid_argument"},
		{"POST", "/v1/sandboxes", `{"snapshot_tag":`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes", `[]`, 422, "invalid_argument"},
		{"GET", "/v1/sandboxes/sb00000000000000000000", "", 404, "not_found"},
		{"GET", "/v1/sandboxes/..%2f..%2fetc", "", 400, "invalid_argument"},
		{"DELETE", "/v1/snapshots/no-such-tag", "", 404, "not_found"},
		{"POST", "/v1/snapshots", `{"tag":"x","kernel":"/etc/passwd"}`, 400, "unsupported"},
		{"POST", "/v1/snapshots", `{"tag":"../x"}`, 400, "invalid_argument"},
		{"POST", "/v1/images", `{"name":"x","packages":["-oAPT::X=/"]}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes/" + sb + "/exec", `{"args":[]}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes/" + sb + "/exec", `{"args":["a\u0000b"]}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes/" + sb + "/exec", `{"args":["true"],"timeout_secs":-1}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes/" + sb + "/exec", `{"args":["true"],"user":"nobody-of-that-name"}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes/" + sb + "/exec", `{"args":["true"],"output_limit":999999999}`, 400, "invalid_argument"},
		{"POST", "/v1/sandboxes/" + sb + "/eval", `{"code":"1","language":"cobol"}`, 400, "unsupported"},
		{"POST", "/v1/sandboxes/" + sb + "/eval", `{}`, 422, "invalid_argument"},
		{"POST", "/v1/sandboxes/sb00000000000000000000/eval", `{"code":"1"}`, 404, "not_found"},
		{"GET", "/v1/nothing", "", 404, "not_found"},
		{"PATCH", "/v1/sandboxes", "", 405, "invalid_argument"},
	} {
		status, e := w.refused(t, c.method, c.path, c.body)
		if status != c.status || e.Code != c.code || e.Error == "" {
			t.Errorf("%s %s %s: %d %+v, want %d %s", c.method, c.path, c.body, status, e, c.status, c.code)
		}
	}
	w.answers(t, sb)
}

// TestRefusesWebPages: a page in a browser of this host cannot use the API.
func TestRefusesWebPages(t *testing.T) {
	w := running(t)
	for header, value := range map[string]string{"Origin": "http://evil.example", "Host": "evil.example"} {
		status, body := w.requestAs(t, header, value)
		var e rest.Error
		if err := json.Unmarshal([]byte(body), &e); err != nil || status != 403 || e.Code != "permission_denied" {
			t.Errorf("%s %s: %d %s", header, value, status, body)
		}
	}
}
