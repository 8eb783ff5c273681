package sandbox

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// forkWith forks and fails the test on an error.
func (w *world) forkWith(f Fork) []Sandbox {
	w.t.Helper()
	var out []Sandbox
	for _, it := range must(w.svc.Fork(w.ctx(), f, nil)) {
		if it.Err != nil {
			w.t.Fatal(it.Err)
		}
		out = append(out, it.Sandbox)
	}
	return out
}

// TestInputsPerChild: each child has its own environment, labels and files, and knows
// its place.
func TestInputsPerChild(t *testing.T) {
	w := newWorld(t, nil)
	base := w.base()
	var children []ChildInput
	for i := range 3 {
		hint := fmt.Sprint("hint-", i)
		children = append(children, ChildInput{
			Env: map[string]string{"HINT": hint}, Labels: map[string]string{"hint": hint},
			Files: map[string][]byte{"/work/hint": []byte(hint), "/work/two": []byte("2")},
		})
	}
	all := w.forkWith(Fork{Snapshot: "base", Children: children, Env: map[string]string{"HINT": "none", "ALL": "yes"}, Labels: map[string]string{"team": "a"}})
	if len(all) != 3 {
		t.Fatalf("%d children", len(all))
	}
	for i, sb := range all {
		hint := fmt.Sprint("hint-", i)
		for _, c := range [][2]string{
			{w.exec(sb.ID, "getenv", "HINT"), hint}, {w.exec(sb.ID, "getenv", "ALL"), "yes"}, {w.exec(sb.ID, "cat", "/work/hint"), hint},
			{w.exec(sb.ID, "getenv", "FORKD_INDEX"), strconv.Itoa(i)}, {w.exec(sb.ID, "getenv", "FORKD_COUNT"), "3"},
			{w.exec(sb.ID, "getenv", "FORKD_BATCH"), sb.Labels[labelBatch]}, {sb.Labels["hint"], hint}, {sb.Labels["team"], "a"},
		} {
			if c[0] != c[1] {
				t.Errorf("child %d has %q, want %q", i, c[0], c[1])
			}
		}
		var p place
		if err := json.Unmarshal([]byte(w.exec(sb.ID, "cat", "/run/forkd/fork.json")), &p); err != nil {
			t.Fatal(err)
		}
		if p.Index != i || p.Count != 3 || p.Batch != sb.Labels[labelBatch] || p.Parent != base.ID || p.Sandbox != sb.ID || fmt.Sprint(p.Labels) != "map[hint:"+hint+" team:a]" {
			t.Errorf("child %d is told %+v", i, p)
		}
	}
}

func TestBadInputs(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	for name, f := range map[string]Fork{
		"number":        {N: 2, Children: []ChildInput{{}}},
		"own label":     {N: 1, Labels: map[string]string{"forkd.parent": "x"}},
		"child's label": {Children: []ChildInput{{Labels: map[string]string{"forkd.index": "x"}}}},
		"env":           {Children: []ChildInput{{Env: map[string]string{"A=B": "x"}}}},
		"secret":        {N: 1, Secrets: map[string]string{"A\x00": "x"}},
		"relative":      {Children: []ChildInput{{Files: map[string][]byte{"a": nil}}}},
		"dots":          {Children: []ChildInput{{Files: map[string][]byte{"/a/../b": nil}}}},
		"root":          {Children: []ChildInput{{Files: map[string][]byte{"/": nil}}}},
		"large":         {Children: []ChildInput{{Files: map[string][]byte{"/a": make([]byte, maxChildFileBytes+1)}}}},
	} {
		f.Snapshot = "base"
		if _, err := w.svc.Fork(w.ctx(), f, nil); errdefs.Class(err) != errdefs.ErrInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	for text, want := range map[string]bool{"": true, "all": true, "system": true, "seed=0": true, "seed=18446744073709551615": true,
		"seed": false, "seed=": false, "seed=-1": false, "seed=x": false, "none": false} {
		if _, err := ParseReseed(text); (err == nil) != want {
			t.Errorf("reseed %q: %v", text, err)
		}
	}
}

// TestReseed: with a seed the generators of child i are the same in each fork and
// differ between children; system leaves those of user space alone.
func TestReseed(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	seeds := func(mode string) []string {
		var out []string
		for _, sb := range w.forkWith(Fork{Snapshot: "base", N: 2, Reseed: must(ParseReseed(mode))}) {
			out = append(out, w.exec(sb.ID, "seed"))
		}
		return out
	}
	a, b, other := seeds("seed=7"), seeds("seed=7"), seeds("seed=8")
	if a[0] != b[0] || a[1] != b[1] || a[0] == a[1] || a[0] == other[0] || a[0] == "" {
		t.Errorf("seeded: %.8s, %.8s, %.8s", a, b, other)
	}
	if s := seeds("system"); s[0] != s[1] {
		t.Errorf("system: %.8s", s)
	}
	if s := seeds("all"); s[0] == s[1] {
		t.Errorf("all: %.8s", s)
	}
}

// TestSecrets: they reach the guest and nothing else, and what holds them is copied
// only by who says so.
func TestSecrets(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	const secret = "hunter2-never-written"
	sb := w.forkWith(Fork{Snapshot: "base", N: 1, Secrets: map[string]string{"KEY": secret}})[0]
	if got := w.exec(sb.ID, "getenv", "KEY"); got != secret || !sb.HoldsSecrets {
		t.Fatalf("the guest has %q, holds_secrets is %v", got, sb.HoldsSecrets)
	}
	_, err := w.svc.Fork(w.ctx(), Fork{Snapshot: sb.ID, N: 1}, nil)
	w.wantClass(err, errdefs.ErrConflict)
	_, err = w.svc.Branch(w.ctx(), sb.ID, Branch{Tag: "leak"})
	w.wantClass(err, errdefs.ErrConflict)
	auto := must(w.svc.Branch(w.ctx(), sb.ID, Branch{}))
	if !auto.Snapshot.HoldsSecrets {
		t.Error("the branch does not say that it holds secrets")
	}
	_, err = w.svc.Fork(w.ctx(), Fork{Snapshot: auto.Snapshot.ID, N: 1}, nil)
	w.wantClass(err, errdefs.ErrConflict)
	w.wantClass(w.svc.GiveTag(w.ctx(), auto.Snapshot.ID, "leak", Tagging{}), errdefs.ErrConflict)
	if err := w.svc.GiveTag(w.ctx(), auto.Snapshot.ID, "known", Tagging{WithSecrets: true}); err != nil {
		t.Error(err)
	}
	child := w.forkWith(Fork{Snapshot: "known", N: 1, WithSecrets: true})[0]
	if got := w.exec(child.ID, "getenv", "KEY"); got != "" || !child.HoldsSecrets {
		t.Errorf("the child has the secret %q, holds_secrets is %v", got, child.HoldsSecrets)
	}
	_, err = w.svc.CreateSnapshot(w.ctx(), CreateSnapshot{Tag: "built", From: "known"}, nil)
	w.wantClass(err, errdefs.ErrConflict)
	if built := w.create(CreateSnapshot{Tag: "built", From: "known", WithSecrets: true}); !built.HoldsSecrets {
		t.Error("what is built on it does not say that it holds secrets")
	}
	must(w.svc.Checkpoint(w.ctx(), sb.ID, Checkpoint{Sync: true}))
	must(w.svc.Rollback(w.ctx(), sb.ID, ""))
	if got := w.exec(sb.ID, "getenv", "KEY"); got != secret {
		t.Errorf("after a rollback the secret is %q", got)
	}
	w.close()
	w.noFileHolds(secret)
	w.open()
	if got := must(w.svc.Sandbox(w.ctx(), sb.ID)); !got.HoldsSecrets {
		t.Error("after a restart nobody knows that it holds secrets")
	}
}

// noFileHolds looks for text in the journal, manifests and whatever else is written,
// except for captured device state, which is the guest's memory.
func (w *world) noFileHolds(text string) {
	w.t.Helper()
	err := filepath.WalkDir(w.data, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		inSnapshot := strings.HasPrefix(path, filepath.Join(w.data, "snapshots")) && filepath.Base(path) != "manifest.json"
		if strings.Contains(string(b), text) && !inSnapshot {
			w.t.Errorf("%s holds the secret", path)
		}
		return err
	})
	if err != nil {
		w.t.Error(err)
	}
}

// TestInheritance is the table of SPECIFICATION, a row each: what a fork of a
// snapshot, a fork of a running sandbox and a rollback have of their source.
func TestInheritance(t *testing.T) {
	w := newWorld(t, nil)
	w.base()
	source := w.forkWith(Fork{
		Snapshot: "base", N: 1, Name: "worker", Env: map[string]string{"ENV": "env"}, Secrets: map[string]string{"SECRET": "secret"},
		Labels: map[string]string{"team": "a"}, MemoryLimitMiB: 512, PIDsLimit: 100,
	})[0]
	id := source.ID
	w.exec(id, "write", "/file", "disk")
	w.eval(id, "v=memory")
	must(w.svc.ScheduleCheckpoints(w.ctx(), id, AutoCheckpoint{Every: time.Hour, Keep: 1}))
	must(w.svc.Checkpoint(w.ctx(), id, Checkpoint{Sync: true}))
	must(w.svc.Branch(w.ctx(), id, Branch{Tag: "branch", WithSecrets: true}))
	seed := w.exec(id, "seed")
	for name, made := range map[string]func() Sandbox{
		"snapshot": func() Sandbox { return w.forkWith(Fork{Snapshot: "branch", N: 1, WithSecrets: true})[0] },
		"running":  func() Sandbox { return w.forkWith(Fork{Snapshot: id, N: 1, WithSecrets: true})[0] },
		"rollback": func() Sandbox { return must(w.svc.Rollback(w.ctx(), id, "")).Sandbox },
	} {
		got := made()
		same := name == "rollback"
		for row, yes := range map[string][2]bool{
			"memory":        {w.eval(got.ID, "v") == "memory", true},
			"disk":          {w.exec(got.ID, "cat", "/file") == "disk", true},
			"env":           {w.exec(got.ID, "getenv", "ENV") == "env", true},
			"secrets":       {w.exec(got.ID, "getenv", "SECRET") == "secret", same},
			"holds_secrets": {got.HoldsSecrets, true},
			"labels":        {got.Labels["team"] == "a", name != "snapshot"},
			"id":            {got.ID == id, same},
			"name":          {got.Name == "worker", same},
			"host name":     {w.exec(got.ID, "hostname") == "worker\n", same},
			"limits":        {got.MemoryLimitMiB == 512 && got.PIDsLimit == 100, same},
			"schedule":      {got.Auto.Every != 0, same},
			"checkpoints":   {len(must(w.svc.Checkpoints(w.ctx(), got.ID))) > 0, same},
			"generators":    {got.Receipt != nil && w.exec(got.ID, "seed") == seed, same},
			"place":         {strings.Contains(w.exec(got.ID, "cat", "/run/forkd/fork.json"), got.ID), true},
		} {
			if yes[0] != yes[1] {
				t.Errorf("%s: %s is inherited: %v, want %v", name, row, yes[0], yes[1])
			}
		}
	}
}
