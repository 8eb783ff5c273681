package e2e

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	forkd "forkd.dev/forkd/sdk/go"
)

// TestFirstSession runs the commands of the README as they stand there.
func TestFirstSession(t *testing.T) {
	w := running(t)
	if w.keep {
		w.cli(t, "snapshot", "rm", "my-base", "py-data")
	}
	t.Cleanup(func() {
		w.killAll(t)
		w.cli(t, "snapshot", "rm", "my-base", "py-data")
	})
	ids := strings.Fields(w.must(t, "fork", "--tag", "py-base", "-n", "10"))
	if len(ids) != 10 {
		t.Fatalf("fork printed %v", ids)
	}
	if got := w.must(t, "eval", ids[0], "import sys; print(sys.version)"); !strings.HasPrefix(got, "3.") {
		t.Errorf("eval printed %q", got)
	}
	w.must(t, "snapshot", "--tag", "my-base", "--image", "python", "--warm", "import numpy, json")
	w.must(t, "snapshot", "--tag", "py-data", "--exec", `python3 -c 'open("/root/data","w").write("x")'`)
	for _, id := range strings.Fields(w.must(t, "fork", "--tag", "py-data", "-n", "5")) {
		if got := w.must(t, "exec", id, "--", "cat", "/root/data"); got != "x" {
			t.Errorf("%s reads %q", id, got)
		}
		w.answers(t, id)
	}
	id := strings.TrimSpace(w.must(t, "fork", "--tag", "my-base"))
	if got := w.must(t, "eval", id, "json.dumps(int(numpy.arange(4).sum()))"); got != "'6'\n" {
		t.Errorf("in a fork of my-base: %q", got)
	}
	if got := len(strings.Fields(w.must(t, "ls"))); got != 16 {
		t.Errorf("ls lists %d sandboxes, want 16", got)
	}
	w.must(t, "kill", "--all")
}

// TestDoctor: this host can do the main job, and the report has its exact shape.
func TestDoctor(t *testing.T) {
	w := running(t)
	got := w.cli(t, "doctor", "--json")
	if got.code != 0 {
		t.Fatalf("doctor: %+v", got)
	}
	dec := json.NewDecoder(strings.NewReader(got.stdout))
	dec.DisallowUnknownFields()
	var report struct {
		Engine *struct {
			Auto   string `json:"auto"`
			Reason string `json:"reason"`
		} `json:"engine"`
		Checks []struct {
			Name   string `json:"name"`
			Status string `json:"status"`
			Detail string `json:"detail"`
			Remedy string `json:"remedy"`
		} `json:"checks"`
	}
	if err := dec.Decode(&report); err != nil || report.Engine == nil {
		t.Fatalf("report %s: %v", got.stdout, err)
	}
	if report.Engine.Auto == "" || report.Engine.Reason == "" {
		t.Errorf("engine %+v", report.Engine)
	}
	for _, c := range report.Checks {
		if c.Name == "" || c.Detail == "" || !slices.Contains([]string{"pass", "warn", "fail", "skip"}, c.Status) ||
			(c.Status != "pass") != (c.Remedy != "") || strings.Contains(c.Remedy, "\n") {
			t.Errorf("check %+v", c)
		}
	}
	if plain := w.must(t, "doctor"); !strings.Contains(plain, "engine auto: "+report.Engine.Auto) {
		t.Errorf("doctor printed %s", plain)
	}
}

// TestSnapshotTree makes a snapshot of a snapshot and takes the tree apart again.
func TestSnapshotTree(t *testing.T) {
	w := running(t)
	first := w.snapshot(t, "tree-1", "--exec", "echo one > /root/one", "--warm", "level = 1")
	second := w.snapshot(t, "tree-2", "--from", "tree-1", "--exec", "cat /root/one; echo two > /root/two", "--warm", "level += 1")
	sb := w.fork(t, "tree-2", 1)[0]
	if got := w.exec(t, sb.ID, "cat /root/one /root/two"); got != "one\ntwo\n" {
		t.Errorf("in a fork of a fork: %q", got)
	}
	if got := w.eval(t, sb.ID, "level"); got != "2" {
		t.Errorf("level is %s", got)
	}
	info := decoded[forkd.SnapshotDetail](t, w, "snapshot", "info", "tree-2")
	if info.ParentID != first.ID || !slices.Equal(info.Ancestors, []string{"py-base", "tree-1"}) || info.Sandboxes != 1 {
		t.Errorf("info of tree-2: %+v", info)
	}
	for _, refused := range []struct {
		code int
		args []string
	}{
		{1, []string{"snapshot", "rm", "tree-1"}},
		{1, []string{"snapshot", "rm", "tree-1", "--cascade"}},
		{1, []string{"snapshot", "rm", "tree-2"}},
		{1, []string{"rmi", "py-base"}},
	} {
		if got := w.cli(t, refused.args...); got.code != refused.code || !strings.Contains(got.stderr, "hint: ") {
			t.Errorf("%v: %+v", refused.args, got)
		}
	}
	w.answers(t, sb.ID)
	w.must(t, "kill", sb.ID)
	w.must(t, "snapshot", "rm", "tree-1", "--cascade")
	for _, sn := range []forkd.Snapshot{first, second} {
		if got := w.cli(t, "snapshot", "info", sn.ID); got.code != 3 {
			t.Errorf("snapshot %s after its removal: %+v", sn.ID, got)
		}
		if _, err := os.Stat(sn.Dir); err == nil {
			t.Errorf("directory %s is still there", sn.Dir)
		}
	}
	w.answers(t, w.fork(t, "py-base", 1)[0].ID)
}

// TestSnapshotSurvivesRestart: what was published is there for the next daemon,
// and can be forked by it.
func TestSnapshotSurvivesRestart(t *testing.T) {
	w := running(t)
	w.snapshot(t, "kept", "--exec", "echo kept > /root/kept", "--warm", "kept = 'yes'")
	w.crash(t)
	w.restart(t)
	sb := w.fork(t, "kept", 1)[0]
	if got := w.exec(t, sb.ID, "cat /root/kept"); got != "kept\n" {
		t.Errorf("file: %q", got)
	}
	if got := w.eval(t, sb.ID, "kept"); got != "'yes'" {
		t.Errorf("variable: %s", got)
	}
}
