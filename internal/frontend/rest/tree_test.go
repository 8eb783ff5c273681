package rest

import (
	"strings"
	"testing"
)

func TestTreeAndDiff(t *testing.T) {
	r := newRig(t, nil)
	r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","name":"w"}`)
	for _, c := range []struct {
		method, path, body, accept string
		status                     int
		want                       string
	}{
		{"GET", "/v1/tree", "", "", 200, `"kind":"sandbox","parent_id":"sn00000000000000000001","depth":1,"name":"w"`},
		{"GET", "/v1/tree?ref=w", "", "", 200, `"py-base"`},
		{"GET", "/v1/tree?ref=none", "", "", 404, "not_found"},
		{"GET", "/v1/tree?ref=../x", "", "", 400, "invalid_argument"},
		{"POST", "/v1/diff", `{"a":"py-base","b":"w","patch":true}`, "", 200, `"path_base64":"L2JhZBtbMkr/"`},
		{"POST", "/v1/diff", `{"a":"py-base","b":"w"}`, "application/x-ndjson", 200, `{"progress":{"step":"listing files","fraction":-1}}` + "\n" + `{"done":true,"diff":{`},
		{"POST", "/v1/diff", `{"a":"w","b":"w"}`, "", 200, `"changes":[],"truncated":false,"processes_added":[]`},
		{"POST", "/v1/diff", `{"a":"py-base","b":"none"}`, "application/x-ndjson", 404, "not_found"},
		{"POST", "/v1/diff", `{"a":"py-base"}`, "", 422, `\"b\" is missing`},
		{"POST", "/v1/diff", `{"a":"py-base","b":"a b"}`, "", 400, "invalid_argument"},
	} {
		if a := r.do(c.method, c.path, c.body, "Accept: "+c.accept); a.status != c.status || !strings.Contains(a.body, c.want) {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, a.status, a.body)
		}
	}
}
