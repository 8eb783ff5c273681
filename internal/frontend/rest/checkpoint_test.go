package rest

import (
	"context"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

func TestCheckpoints(t *testing.T) {
	r := newRig(t, nil)
	r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","name":"w"}`)
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"POST", "/v1/sandboxes/w/rollback", "", 404, "list them with"},
		{"POST", "/v1/sandboxes/w/checkpoints", "", 202, `"status":"writing"`},
		{"POST", "/v1/sandboxes/w/checkpoints", `{"label":"l","sync":true}`, 201, `"forkd.label":"l"`},
		{"POST", "/v1/sandboxes/w/checkpoints", `[]`, 422, "invalid_argument"},
		{"POST", "/v1/sandboxes/x/checkpoints", "", 404, "not_found"},
		{"GET", "/v1/sandboxes/w/checkpoints", "", 200, `"id":"ck00000000000000000002"`},
		{"POST", "/v1/sandboxes/w/rollback", "", 200, `"checkpoint_id":"ck00000000000000000002"`},
		{"POST", "/v1/sandboxes/w/rollback", `{"checkpoint":"ck00000000000000000001"}`, 200, `"duration_ms":120`},
		{"PUT", "/v1/sandboxes/w/auto-checkpoint", `{"every":"30s"}`, 200, `"auto_checkpoint":{"every":"30s","keep":20}`},
		{"PUT", "/v1/sandboxes/w/auto-checkpoint", `{"every":"off"}`, 200, `"holds_secrets":false,"receipt"`},
		{"PUT", "/v1/sandboxes/w/auto-checkpoint", `{}`, 422, "every"},
		{"PUT", "/v1/sandboxes/w/auto-checkpoint", `{"every":"often"}`, 400, "no interval"},
		{"POST", "/v1/sandboxes/w/exec", `{"args":["true"],"checkpoint":true}`, 200, `"checkpoint_id":"ck00000000000000000003"`},
	} {
		if a := r.do(c.method, c.path, c.body); a.status != c.status || !strings.Contains(a.body, c.want) {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, a.status, a.body)
		}
	}
}

// TestSecretsAreNotTold: neither an answer nor the log names the value of a secret.
func TestSecretsAreNotTold(t *testing.T) {
	r := newRig(t, nil)
	const secret = "hunter2"
	got := ""
	r.svc.OnFork = func(_ context.Context, f sandbox.Fork) error {
		got = f.Secrets["KEY"]
		return errdefs.New(errdefs.ErrConflict, "no")
	}
	for _, body := range []string{
		`{"snapshot_tag":"py-base","secrets":{"KEY":"` + secret + `"}}`,
		`{"snapshot_tag":"py-base","secrets":{"KEY":{"a":"` + secret + `"}}}`,
		`{"snapshot_tag":"py-base","secrets":"` + secret + `"}`,
		`{"snapshot_tag":"py-base","n":"x","secrets":{"KEY":"` + secret + `"}`,
	} {
		if a := r.do("POST", "/v1/sandboxes", body); a.status/100 == 2 || strings.Contains(a.body, secret) {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
	if strings.Contains(r.log.String(), secret) {
		t.Error("the log names the secret")
	}
	if got != secret {
		t.Errorf("the service got %q", got)
	}
}
