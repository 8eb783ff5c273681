package cli

import (
	"strings"
	"testing"

	"forkd.dev/forkd/internal/frontend/rest/resttest"
)

func TestLayers(t *testing.T) {
	r := newRig(t)
	id := strings.TrimSpace(r.run("fork", "py-base").stdout)
	r.run("branch", id, "--tag", "b1")
	for _, c := range []struct {
		code  int
		piece string
		args  []string
	}{
		{0, `"branched_from": "compact:sn00000000000000000002"`, []string{"snapshot", "compact", "b1", "--to", "flat", "--json"}},
		{0, "sn0", []string{"snapshot-compact", "--from", "b1", "--to", "flat2"}},
		{1, "taken", []string{"snapshot", "compact", "b1", "--to", "flat"}},
		{0, "sn0", []string{"snapshot", "compact", "b1", "--to", "flat", "--replace"}},
		{2, "--to", []string{"snapshot", "compact", "b1"}},
		{2, "b1", []string{"snapshot", "compact", "b1", "--to", "b1"}},
		{3, "no snapshot", []string{"snapshot", "compact", "absent", "--to", "x"}},
		{1, "no recipe", []string{"snapshot", "rebuild", "b1"}},
		{0, `"py-base"`, []string{"snapshot", "rebuild", "py-base", "--json"}},
		{0, `"damaged": 0`, []string{"verify", "--json"}},
		{0, "", []string{"verify", "b1"}},
		{3, "no snapshot", []string{"verify", "absent"}},
		{0, `"own_bytes"`, []string{"df", "--json"}},
		{2, "prune what", []string{"prune"}},
		{2, "time span", []string{"prune", "--older", "soon"}},
		{2, "time span", []string{"prune", "--older", "-3d"}},
		{2, "keep is -2", []string{"prune", "--keep", "-2"}},
		{2, "KEY", []string{"prune", "--label", "=x"}},
		{0, `"dry_run": true`, []string{"prune", "--older", "7d", "--dry-run", "--json"}},
		{0, "sn00000000000000000002", []string{"prune", "--older", "90m", "-n"}},
	} {
		if got := r.run(c.args...); got.code != c.code || !strings.Contains(got.stdout+got.stderr, c.piece) {
			t.Errorf("forkd %s: %+v, want code %d and %q", strings.Join(c.args, " "), got, c.code, c.piece)
		}
	}
	r.run("snapshot", "tag", "b1", resttest.Damaged)
	if got := r.run("verify", "--repair"); got.code != 1 || got.stdout != "sn00000000000000000002\n" || !strings.Contains(got.stderr, "1 of ") {
		t.Errorf("verify of a damaged one: %+v", got)
	}
	r.tty = true
	if got := r.run("df"); got.code != 0 || !strings.Contains(got.stdout, "free on disk") || !strings.Contains(got.stdout, "py-base") {
		t.Errorf("df: %+v", got)
	}
	if got := r.run("prune", "--keep", "0"); !strings.Contains(got.stdout, "stays: it is built in") || !strings.Contains(got.stdout, "deleted") {
		t.Errorf("prune: %+v", got)
	}
	if got := r.run("verify"); !strings.Contains(got.stdout, "ok") {
		t.Errorf("verify: %+v", got)
	}
}
