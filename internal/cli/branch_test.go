package cli

import (
	"strings"
	"testing"
)

func TestBranch(t *testing.T) {
	r := newRig(t)
	id := strings.TrimSpace(r.run("fork", "py-base").stdout)
	if got := r.run("branch", id, "--tag", "b1"); got.code != 0 || got.stdout != "sn00000000000000000002\n" {
		t.Errorf("branch: %+v", got)
	}
	for _, c := range []struct {
		code  int
		piece string
		args  []string
	}{
		{0, `"status": "writing"`, []string{"branch", id, "--no-wait", "--json"}},
		{0, `"diff_ms": 3`, []string{"branch", id, "--mode", "diff", "--json"}},
		{0, `"stall_ms": 20`, []string{"branch", id, "--freeze=false", "--sync", "--json"}},
		{1, "taken", []string{"branch", id, "-t", "b1"}},
		{0, "", []string{"branch", id, "-t", "b1", "--replace"}},
		{2, "mode", []string{"branch", id, "--mode", "torn"}},
		{2, "wait", []string{"branch", id, "--mode", "full", "--no-wait"}},
		{2, "accepts 1 arg", []string{"branch"}},
		{3, "no sandbox", []string{"branch", "absent"}},
		{2, "KEY=VALUE", []string{"branch", id, "-l", "odd"}},
		{0, `"branched_from": "` + id + `"`, []string{"snapshot", "--from-sandbox", id, "--tag", "old", "--json"}},
		{0, `"status": "writing"`, []string{"snapshot", "--from-sandbox", id, "--live", "--no-wait", "--json"}},
		{0, `"diff_ms"`, []string{"snapshot", "--from-sandbox", id, "--diff", "--json"}},
		{2, "needs --live", []string{"snapshot", "--from-sandbox", id, "--no-wait"}},
		{2, "exclude each other", []string{"snapshot", "--from-sandbox", id, "--live", "--diff"}},
		{2, "--from-sandbox", []string{"snapshot", "--tag", "x", "--live"}},
		{2, "do not go with it", []string{"snapshot", "--from-sandbox", id, "--image", "python"}},
	} {
		if got := r.run(c.args...); got.code != c.code || !strings.Contains(got.stdout+got.stderr, c.piece) {
			t.Errorf("forkd %s: %+v, want code %d and %q", strings.Join(c.args, " "), got, c.code, c.piece)
		}
	}
	r.tty = true
	if got := r.run("branch", id); !strings.Contains(got.stdout, "PAUSE") || !strings.Contains(got.stdout, "3.0 ms") {
		t.Errorf("on a terminal: %+v", got)
	}
}
