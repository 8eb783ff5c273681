package rest

import (
	"strings"
	"testing"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
)

// TestLayers: requests, their status, and a piece of each answer.
func TestLayers(t *testing.T) {
	r := newRig(t, nil)
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"POST", "/v1/snapshots/py-base/compact", `{"to":"flat"}`, 200, `"branched_from":"compact:sn00000000000000000001"`},
		{"POST", "/v1/snapshots/py-base/compact", `{"to":"flat"}`, 409, `"conflict"`},
		{"POST", "/v1/snapshots/py-base/compact", `{"to":"flat","replace":true}`, 200, `"status":"ready"`},
		{"POST", "/v1/snapshots/py-base/compact", `{"to":"py-base"}`, 400, `"invalid_argument"`},
		{"POST", "/v1/snapshots/py-base/compact", `{"to":"../x"}`, 400, `"invalid_argument"`},
		{"POST", "/v1/snapshots/py-base/compact", `{}`, 422, `is missing`},
		{"POST", "/v1/snapshots/absent/compact", `{"to":"x"}`, 404, `"not_found"`},
		{"POST", "/v1/snapshots/flat/rebuild", ``, 400, `"unsupported"`},
		{"POST", "/v1/snapshots/absent/rebuild", ``, 404, `"not_found"`},
		{"POST", "/v1/snapshots/py-base/rebuild", ``, 201, `"tag":"py-base"`},
		{"POST", "/v1/verify", ``, 200, `"damaged":0`},
		{"POST", "/v1/verify", `{"snapshot":"py-base"}`, 200, `"ok":true`},
		{"POST", "/v1/verify", `{"snapshot":"a b"}`, 400, `"invalid_argument"`},
		{"POST", "/v1/verify", `{"snapshot":"absent"}`, 404, `"not_found"`},
		{"GET", "/v1/df", ``, 200, `"min_free_bytes":1073741824`},
		{"POST", "/v1/prune", `{}`, 400, `"invalid_argument"`},
		{"POST", "/v1/prune", `{"older_secs":-1}`, 400, `"invalid_argument"`},
		{"POST", "/v1/prune", `{"older_secs":1e300}`, 400, `"invalid_argument"`},
		{"POST", "/v1/prune", `{"keep":-1}`, 400, `"invalid_argument"`},
		{"POST", "/v1/prune", `{"keep":"1"}`, 422, `"invalid_argument"`},
		{"POST", "/v1/prune", `{"keep":1,"dry_run":true}`, 200, `"kept":"it is built in"`},
	} {
		a := r.do(c.method, c.path, c.body)
		if a.status != c.status || !strings.Contains(a.body, c.want) {
			t.Errorf("%s %s %s: %d %s, want %d with %s", c.method, c.path, c.body, a.status, a.body, c.status, c.want)
		}
	}
	r.do("PUT", "/v1/tags/"+resttest.Damaged, `{"snapshot":"flat"}`)
	res := into[api.VerifyResult](t, r.do("POST", "/v1/verify", `{"repair":true}`))
	if res.Damaged != 1 || len(res.Checked) < 2 {
		t.Errorf("verify: %+v", res)
	}
	lines := strings.Split(strings.TrimSpace(r.do("POST", "/v1/verify", `{}`, "Accept: application/x-ndjson").body), "\n")
	if last := lines[len(lines)-1]; len(lines) < 2 || !strings.Contains(last, `"done":true`) || !strings.Contains(last, `"result"`) {
		t.Errorf("verify line by line: %q", lines)
	}
	lines = strings.Split(strings.TrimSpace(r.do("POST", "/v1/snapshots/py-base/compact", `{"to":"x"}`, "Accept: application/x-ndjson").body), "\n")
	if last := lines[len(lines)-1]; !strings.Contains(last, `"snapshot"`) {
		t.Errorf("compact line by line: %q", lines)
	}
}
