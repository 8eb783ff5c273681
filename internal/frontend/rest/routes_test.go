package rest

import (
	"context"
	"errors"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
)

// TestOpenAPIListsTheRoutes holds openapi.yaml to what is served.
func TestOpenAPIListsTheRoutes(t *testing.T) {
	var described []string
	_, text, _ := strings.Cut(string(api.OpenAPI), "\npaths:\n")
	text, _, _ = strings.Cut(text, "\ncomponents:\n")
	path := ""
	for line := range strings.Lines(text) {
		if m := regexp.MustCompile(`^  (/\S*):`).FindStringSubmatch(line); m != nil {
			path = m[1]
		} else if m := regexp.MustCompile(`^    (get|post|put|delete|patch):`).FindStringSubmatch(line); m != nil {
			described = append(described, strings.ToUpper(m[1])+" "+path)
		}
	}
	var served []string
	s := &server{svc: resttest.New(), replays: newReplays(time.Now)}
	for _, rt := range s.routes() {
		served = append(served, rt.method+" "+rt.path)
	}
	slices.Sort(described)
	slices.Sort(served)
	if !slices.Equal(described, served) {
		t.Errorf("openapi.yaml describes\n%s\nbut served are\n%s", strings.Join(described, "\n"), strings.Join(served, "\n"))
	}
}

// TestRefusals runs what must be refused, and that it changes nothing.
func TestRefusals(t *testing.T) {
	r := newRig(t, nil)
	id := r.fork()
	sb := "/v1/sandboxes/" + id
	before := r.svc.Changes()
	for _, c := range []struct {
		name, method, path, body string
		headers                  []string
		status                   int
		code                     string
	}{
		{"unknown route", "GET", "/v1/nothing", "", nil, 404, "not_found"},
		{"root", "GET", "/", "", nil, 404, "not_found"},
		{"wrong method", "PATCH", "/v1/sandboxes", "", nil, 405, "invalid_argument"},
		{"bad syntax", "POST", "/v1/sandboxes", `{"n":`, nil, 400, "invalid_argument"},
		{"trailing garbage", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base"} x`, nil, 400, "invalid_argument"},
		{"not an object", "POST", "/v1/sandboxes", `[1]`, nil, 422, "invalid_argument"},
		{"null", "POST", "/v1/sandboxes", `null`, nil, 422, "invalid_argument"},
		{"wrong type", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":"5"}`, nil, 422, "invalid_argument"},
		{"n too large for an int", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":99999999999999999999}`, nil, 422, "invalid_argument"},
		{"missing tag", "POST", "/v1/sandboxes", `{"n":1}`, nil, 422, "invalid_argument"},
		{"no content type", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base"}`, []string{"Content-Type: "}, 415, "invalid_argument"},
		{"form", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base"}`, []string{"Content-Type: text/plain"}, 415, "invalid_argument"},
		{"too large", "POST", "/v1/sandboxes", `{"snapshot_tag":"` + strings.Repeat("x", forkBody) + `"}`, nil, 413, "invalid_argument"},
		{"n = 0", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":0}`, nil, 400, "invalid_argument"},
		{"n = -1", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":-1}`, nil, 400, "invalid_argument"},
		{"n = 100000", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":100000}`, nil, 400, "invalid_argument"},
		{"unknown tag", "POST", "/v1/sandboxes", `{"snapshot_tag":"absent"}`, nil, 404, "not_found"},
		{"tag is a path", "POST", "/v1/sandboxes", `{"snapshot_tag":"../../etc"}`, nil, 400, "invalid_argument"},
		{"live_fork", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","live_fork":true}`, nil, 400, "unsupported"},
		{"hugepages", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","hugepages":true}`, nil, 400, "unsupported"},
		{"memory limit", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","memory_limit_mib":0}`, nil, 400, "invalid_argument"},
		{"other size", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","memory_mib":1024}`, nil, 400, "invalid_argument"},
		{"long key", "POST", "/v1/sandboxes", `{"snapshot_tag":"py-base"}`, []string{"Idempotency-Key: " + strings.Repeat("k", 256)}, 400, "invalid_argument"},
		{"unknown sandbox", "GET", "/v1/sandboxes/sb-68a1-0001", "", nil, 404, "not_found"},
		{"path for a reference", "GET", "/v1/sandboxes/..%2f..%2fetc", "", nil, 400, "invalid_argument"},
		{"dots for a reference", "GET", "/v1/snapshots/%2e%2e", "", nil, 400, "invalid_argument"},
		{"empty reference", "POST", "/v1/sandboxes//ping", "", nil, 400, "invalid_argument"},
		{"odd reference", "DELETE", "/v1/sandboxes/a%20b", "", nil, 400, "invalid_argument"},
		{"kill unknown", "DELETE", "/v1/sandboxes/absent", "", nil, 404, "not_found"},
		{"exec without args", "POST", sb + "/exec", `{"args":[]}`, nil, 400, "invalid_argument"},
		{"exec of nothing", "POST", sb + "/exec", `{"args":[""]}`, nil, 400, "invalid_argument"},
		{"exec args a string", "POST", sb + "/exec", `{"args":"ls"}`, nil, 422, "invalid_argument"},
		{"exec NUL", "POST", sb + "/exec", `{"args":["a\u0000b"]}`, nil, 400, "invalid_argument"},
		{"exec bad env", "POST", sb + "/exec", `{"args":["a"],"env":{"A=B":"c"}}`, nil, 400, "invalid_argument"},
		{"exec timeout 0", "POST", sb + "/exec", `{"args":["a"],"timeout_secs":0}`, nil, 400, "invalid_argument"},
		{"exec timeout huge", "POST", sb + "/exec", `{"args":["a"],"timeout_secs":1e300}`, nil, 400, "invalid_argument"},
		{"exec two inputs", "POST", sb + "/exec", `{"args":["a"],"stdin":"x","stdin_base64":"eA=="}`, nil, 400, "invalid_argument"},
		{"exec bad base64", "POST", sb + "/exec", `{"args":["a"],"stdin_base64":"%%%"}`, nil, 422, "invalid_argument"},
		{"exec output limit", "POST", sb + "/exec", `{"args":["a"],"output_limit":-1}`, nil, 400, "invalid_argument"},
		{"exec in an unknown one", "POST", "/v1/sandboxes/absent/exec", `{"args":["missing"]}`, nil, 404, "not_found"},
		{"eval without code", "POST", sb + "/eval", `{}`, nil, 422, "invalid_argument"},
		{"eval in an unknown one", "POST", "/v1/sandboxes/absent/eval", `{"code":"1"}`, nil, 404, "not_found"},
		{"ping an unknown one", "POST", "/v1/sandboxes/absent/ping", "", nil, 404, "not_found"},
		{"snapshot of paths", "POST", "/v1/snapshots", `{"tag":"x","kernel":"/k","rootfs":"/r"}`, nil, 400, "unsupported"},
		{"snapshot without tag", "POST", "/v1/snapshots", `{}`, nil, 422, "invalid_argument"},
		{"snapshot bad tag", "POST", "/v1/snapshots", `{"tag":"../x"}`, nil, 400, "invalid_argument"},
		{"snapshot of both", "POST", "/v1/snapshots", `{"tag":"x","image":"python","from":"py-base"}`, nil, 400, "invalid_argument"},
		{"snapshot tag taken", "POST", "/v1/snapshots", `{"tag":"py-base"}`, nil, 409, "conflict"},
		{"delete unknown", "DELETE", "/v1/snapshots/absent", "", nil, 404, "not_found"},
		{"delete both flags", "DELETE", "/v1/snapshots/py-base?cascade=true&force=true", "", nil, 400, "invalid_argument"},
		{"delete bad flag", "DELETE", "/v1/snapshots/py-base?cascade=perhaps", "", nil, 400, "invalid_argument"},
		{"info of unknown", "GET", "/v1/snapshots/absent/info", "", nil, 404, "not_found"},
		{"tag of id form", "PUT", "/v1/tags/sn00000000000000000001", `{"snapshot":"py-base"}`, nil, 400, "invalid_argument"},
		{"tag of nothing", "PUT", "/v1/tags/x", `{}`, nil, 422, "invalid_argument"},
		{"untag unknown", "DELETE", "/v1/tags/absent", "", nil, 404, "not_found"},
		{"image without name", "POST", "/v1/images", `{}`, nil, 422, "invalid_argument"},
		{"image in use", "DELETE", "/v1/images/python", "", nil, 409, "conflict"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := r.do(c.method, c.path, c.body, c.headers...)
			e := into[api.Error](t, a)
			if a.status != c.status || e.Code != c.code || e.Error == "" {
				t.Errorf("%s %s: got %d %.300s, want %d %s", c.method, c.path, a.status, a.body, c.status, c.code)
			}
			if got := a.header.Get("Content-Type"); got != api.JSON {
				t.Errorf("Content-Type is %q", got)
			}
		})
	}
	if after := r.svc.Changes(); after != before {
		t.Errorf("refused requests made %d changes", after-before)
	}
}

// TestStatusTable proves docs/errors.md: each class has its status and code.
func TestStatusTable(t *testing.T) {
	r := newRig(t, nil)
	for _, c := range []struct {
		err    error
		status int
		code   string
	}{
		{errdefs.ErrInvalid, 400, "invalid_argument"},
		{errdefs.ErrUnsupported, 400, "unsupported"},
		{errdefs.ErrUnauthenticated, 401, "unauthenticated"},
		{errdefs.ErrPermission, 403, "permission_denied"},
		{errdefs.ErrNotFound, 404, "not_found"},
		{errdefs.ErrConflict, 409, "conflict"},
		{errdefs.ErrNotReady, 409, "not_ready"},
		{errdefs.ErrIncompatible, 409, "incompatible"},
		{errdefs.ErrCanceled, 499, "canceled"},
		{context.Canceled, 499, "canceled"},
		{errdefs.ErrCorrupt, 500, "corrupt"},
		{errdefs.ErrInternal, 500, "internal"},
		{errors.New("of no class"), 500, "internal"},
		{errdefs.ErrGuest, 502, "guest_failure"},
		{errdefs.ErrResourceExhausted, 503, "resource_exhausted"},
		{errdefs.ErrUnavailable, 503, "unavailable"},
		{errdefs.ErrTimeout, 504, "timeout"},
		{context.DeadlineExceeded, 504, "timeout"},
	} {
		r.svc.Err = errdefs.WithHint(c.err, "do this")
		a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base"}`)
		e := into[api.Error](t, a)
		if a.status != c.status || e.Code != c.code || e.Hint != "do this" {
			t.Errorf("%v: got %d %s, want %d %s", c.err, a.status, a.body, c.status, c.code)
		}
		if full := a.header.Get("Retry-After") != ""; full != errors.Is(c.err, errdefs.ErrResourceExhausted) {
			t.Errorf("%v: Retry-After is %q", c.err, a.header.Get("Retry-After"))
		}
	}
}

func TestPanicIsOne500(t *testing.T) {
	r := newRig(t, nil)
	id := r.fork()
	r.svc.OnExec = func(context.Context, string, agentwire.ExecRequest) (agentwire.ExecResult, error) {
		panic("secret detail")
	}
	a := r.do("POST", "/v1/sandboxes/"+id+"/exec", `{"args":["a"]}`, "X-Request-Id: req-1")
	if a.status != 500 || strings.Contains(a.body, "secret") || strings.Contains(a.body, "goroutine") {
		t.Errorf("got %d %s", a.status, a.body)
	}
	if !strings.Contains(a.body, "req-1") || !strings.Contains(r.log.String(), "secret detail") {
		t.Errorf("the request id is missing in %s or the cause in the log", a.body)
	}
	if got := r.do("GET", "/healthz", ""); got.status != http.StatusOK {
		t.Errorf("after a panic: %d", got.status)
	}
}

func TestHealthAndVersion(t *testing.T) {
	var sick error
	r := newRig(t, func(c *Config) { c.Health = func(context.Context) error { return sick } })
	if a := r.do("GET", "/healthz", ""); a.status != 200 || a.body != "{\"ok\":true}\n" {
		t.Errorf("healthz: %d %s", a.status, a.body)
	}
	if a := r.do("GET", "/version", ""); into[api.Version](t, a) != (api.Version{Version: "test", API: "v1"}) {
		t.Errorf("version: %d %s", a.status, a.body)
	}
	if a := r.do("GET", "/v1/openapi.yaml", ""); a.body != string(api.OpenAPI) {
		t.Errorf("openapi.yaml: %d, %d bytes", a.status, len(a.body))
	}
	sick = errors.New("disk is full")
	if a := r.do("GET", "/healthz", ""); a.status != 503 || !strings.Contains(a.body, "disk is full") {
		t.Errorf("healthz when sick: %d %s", a.status, a.body)
	}
}
