package rest

import (
	"strings"
	"testing"

	api "forkd.dev/forkd/api/rest"
)

// TestBranch runs upstream's rules for branch requests and ours: each row is a
// request, the status and a piece of the answer.
func TestBranch(t *testing.T) {
	r := newRig(t, nil)
	id := r.fork()
	at := "/v1/sandboxes/" + id + "/branch"
	for _, c := range []struct {
		name, body string
		status     int
		want       string
	}{
		{"nothing said", `{}`, 201, `"branched_from":"` + id + `"`},
		{"no body", ``, 201, `"status":"ready"`},
		{"tag", `{"tag":"one"}`, 201, `"tag":"one"`},
		{"tag taken", `{"tag":"one"}`, 409, `"conflict"`},
		{"tag replaced", `{"tag":"one","replace":true}`, 201, `"stall_ms":20`},
		{"bad tag", `{"tag":"../x"}`, 400, `"invalid_argument"`},
		{"tag of id form", `{"tag":"sn00000000000000000001"}`, 400, `"invalid_argument"`},
		{"mode full", `{"mode":"full"}`, 201, `"pause_ms":3`},
		{"mode live", `{"mode":"live"}`, 201, `"layer_bytes":307200`},
		{"mode diff", `{"mode":"diff"}`, 201, `"diff_physical_bytes":307200,"diff_logical_bytes":536870912`},
		{"legacy diff", `{"diff":true}`, 201, `"diff_ms":3`},
		{"legacy live", `{"live":true}`, 201, `"copied_bytes":1048576`},
		{"measure_diff", `{"measure_diff":true}`, 201, `"diff_physical_bytes"`},
		{"measure_diff of full", `{"mode":"full","measure_diff":true}`, 201, `"chain_depth":0`},
		{"measure_diff of live", `{"mode":"live","measure_diff":true}`, 400, `measure_diff`},
		{"unknown mode", `{"mode":"torn"}`, 400, `"invalid_argument"`},
		{"mode and diff", `{"mode":"diff","diff":true}`, 400, `old spellings`},
		{"mode and live", `{"mode":"full","live":true}`, 400, `old spellings`},
		{"diff and live", `{"diff":true,"live":true}`, 400, `more than one`},
		{"measure and diff", `{"measure_diff":true,"diff":true}`, 400, `more than one`},
		{"no wait", `{"wait":false}`, 202, `"status":"writing"`},
		{"no wait live", `{"wait":false,"mode":"live"}`, 202, `"bootable":false`},
		{"no wait legacy live", `{"wait":false,"live":true}`, 202, `"status":"writing"`},
		{"no wait full", `{"wait":false,"mode":"full"}`, 400, `wait`},
		{"no wait diff", `{"wait":false,"diff":true}`, 400, `wait`},
		{"parent", `{"mode":"diff","parent_tag":"py-base"}`, 201, `"parent_id"`},
		{"other parent", `{"mode":"diff","parent_tag":"other"}`, 400, `was not forked from other`},
		{"parent without diff", `{"parent_tag":"py-base"}`, 400, `mode diff`},
		{"odd parent", `{"mode":"diff","parent_tag":"a b"}`, 400, `"invalid_argument"`},
		{"wait is no bool", `{"wait":"no"}`, 422, `"invalid_argument"`},
		{"our fields", `{"freeze":false,"sync":true,"labels":{"a":"b"}}`, 201, `"labels":{"a":"b"}`},
	} {
		a := r.do("POST", at, c.body)
		if a.status != c.status || !strings.Contains(a.body, c.want) {
			t.Errorf("%s: %d %s, want %d with %s", c.name, a.status, a.body, c.status, c.want)
		}
	}
	if a := r.do("POST", "/v1/sandboxes/absent/branch", `{}`); a.status != 404 {
		t.Errorf("branch of nothing: %d %s", a.status, a.body)
	}
	if a := r.do("POST", at, `{"tag":"x"}`, "Content-Type: text/plain"); a.status != 415 {
		t.Errorf("branch by a form: %d %s", a.status, a.body)
	}
	b := into[api.Branch](t, r.do("POST", at, `{"tag":"twice"}`, "Idempotency-Key: k"))
	if again := into[api.Branch](t, r.do("POST", at, `{"tag":"twice"}`, "Idempotency-Key: k")); again.ID != b.ID {
		t.Errorf("repeated with the same key: %s, then %s", b.ID, again.ID)
	}
}
