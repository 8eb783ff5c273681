package rest

import (
	"strings"
	"testing"

	api "forkd.dev/forkd/api/rest"
)

func TestPack(t *testing.T) {
	r := newRig(t, nil)
	a := r.do("GET", "/v1/snapshots/py-base/pack", "")
	if a.status != 200 || a.header.Get("Content-Type") != api.Zstd || len(a.body) < 3<<20 {
		t.Fatalf("pack: %d %v, %d bytes", a.status, a.header, len(a.body))
	}
	for _, c := range []struct {
		method, path, body string
		headers            []string
		status             int
		want               string
	}{
		{"GET", "/v1/snapshots/absent/pack", "", nil, 404, `"not_found"`},
		{"GET", "/v1/snapshots/py-base/pack?with_secrets=perhaps", "", nil, 400, `"invalid_argument"`},
		{"POST", "/v1/packs?tag=theirs", a.body, []string{"Content-Type: application/zstd"}, 201, `"tag":"theirs"`},
		{"POST", "/v1/packs?tag=theirs", a.body, []string{"Content-Type: application/zstd"}, 409, `"conflict"`},
		{"POST", "/v1/packs?tag=theirs&force=true", a.body, []string{"Content-Type: application/zstd"}, 201, `"status":"ready"`},
		{"POST", "/v1/packs?tag=a%2fb", a.body, []string{"Content-Type: application/zstd"}, 400, `"invalid_argument"`},
		{"POST", "/v1/packs?force=x", a.body, []string{"Content-Type: application/zstd"}, 400, `"invalid_argument"`},
		{"POST", "/v1/packs", a.body[:1<<20], []string{"Content-Type: application/zstd"}, 400, `"corrupt"`},
		{"POST", "/v1/packs", "{}", nil, 415, `"invalid_argument"`},
	} {
		got := r.do(c.method, c.path, c.body, c.headers...)
		if got.status != c.status || !strings.Contains(got.body, c.want) {
			t.Errorf("%s %s: %d %.300s, want %d with %s", c.method, c.path, got.status, got.body, c.status, c.want)
		}
	}
}
