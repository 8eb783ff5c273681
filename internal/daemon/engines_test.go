package daemon

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/config"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/fake"
	"forkd.dev/forkd/internal/engine/gvisor"
	"forkd.dev/forkd/internal/engine/selection"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/store/metadata"
)

// fakeHost has engines that exist in this process only.
type fakeHost struct {
	*engines
	hosts map[string]*fake.Registry
	fail  map[string]error // of opening
	prove map[string]error
	opens map[string]int
}

func newFakeHost(t *testing.T, ready ...string) *fakeHost {
	t.Helper()
	h := &fakeHost{hosts: map[string]*fake.Registry{}, fail: map[string]error{}, prove: map[string]error{}, opens: map[string]int{}}
	h.engines = &engines{dataDir: t.TempDir(), speed: func(context.Context) selection.Speed {
		return selection.Speed{KVM: linux.KVMSpeed{Instructions: 1, Took: time.Second}}
	}}
	for _, name := range selection.Names() {
		h.hosts[name] = fake.NewRegistry()
		entry := engineEntry{
			name: name,
			open: func(_ context.Context, s engineSetup) (engine.Driver, error) {
				h.opens[name]++
				if err := h.fail[name]; err != nil {
					return nil, err
				}
				return fake.New(fake.Config{Name: name, Registry: h.hosts[name], Installation: s.installation}), nil
			},
			prove: func(context.Context, engineSetup, engine.Driver) error { return h.prove[name] },
		}
		for _, r := range ready {
			entry.ready = entry.ready || r == name
		}
		h.entries = append(h.entries, entry)
	}
	return h
}

// TestRegistry: what the settings know, what auto tries and what there is are the same.
func TestRegistry(t *testing.T) {
	known := map[string]bool{}
	for _, entry := range registry() {
		known[entry.name] = true
		if _, err := config.Load(config.Sources{Getenv: func(string) string { return "" }, Flags: map[string][]string{"engine": {entry.name}}}); err != nil {
			t.Error(err)
		}
	}
	for _, name := range selection.Names() {
		if !known[name] {
			t.Errorf("auto tries %s, which is not there", name)
		}
		delete(known, name)
	}
	if len(known) > 0 {
		t.Errorf("auto never tries %v", known)
	}
}

func TestPick(t *testing.T) {
	broken := errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "it is broken"), "mend it")
	for name, c := range map[string]struct {
		asked  string
		inUse  map[string]int
		ready  []string
		breaks []string
		want   string
		class  error
		text   string // of reason or error
	}{
		"nothing asked":            {ready: []string{"qemu"}, want: "qemu", text: "so qemu"},
		"auto, gvisor ready":       {asked: "auto", ready: []string{"gvisor", "qemu"}, want: "gvisor", text: "so gvisor"},
		"auto, gvisor broken":      {asked: "auto", ready: []string{"gvisor", "qemu"}, breaks: []string{"gvisor"}, want: "qemu", text: "gvisor cannot run here: it is broken"},
		"auto, slow kvm":           {asked: "auto", ready: []string{"kvm", "gvisor", "qemu"}, want: "gvisor", text: "kvm is not worth it"},
		"auto, all broken":         {asked: "auto", ready: []string{"gvisor", "qemu"}, breaks: []string{"gvisor", "qemu"}, class: errdefs.ErrUnavailable, text: "no engine works here"},
		"asked for":                {asked: "kvm", ready: []string{"qemu"}, want: "kvm", text: "asked for"},
		"unknown":                  {asked: "bhyve", class: errdefs.ErrInvalid, text: `there is no engine "bhyve"`},
		"auto goes on":             {asked: "auto", inUse: map[string]int{"qemu": 2}, ready: []string{"gvisor", "qemu"}, want: "qemu", text: "are running"},
		"the same is asked":        {asked: "qemu", inUse: map[string]int{"qemu": 2}, want: "qemu", text: "asked for"},
		"another is asked":         {asked: "gvisor", inUse: map[string]int{"qemu": 2}, class: errdefs.ErrConflict, text: "2 sandboxes of engine qemu run on the data directory"},
		"auto over two":            {asked: "auto", inUse: map[string]int{"qemu": 2, "gvisor": 1}, class: errdefs.ErrConflict, text: "1 sandboxes of engine gvisor"},
		"auto over an unknown one": {asked: "auto", inUse: map[string]int{"bhyve": 1}, class: errdefs.ErrConflict, text: "engine bhyve"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newFakeHost(t, c.ready...)
			for _, e := range c.breaks {
				h.fail[e] = broken
			}
			got, reason, err := h.pick(t.Context(), c.asked, c.inUse)
			text := reason
			if err != nil {
				text = err.Error()
				if errdefs.Hint(err) == "" {
					t.Errorf("error %v has no hint", err)
				}
			}
			if got != c.want || !errors.Is(err, c.class) || !strings.Contains(text, c.text) {
				t.Errorf("got %q, %q, want %q with %q", got, text, c.want, c.text)
			}
		})
	}
}

// TestProbe: an engine that opens but does not work is not available, and the probe
// leaves nothing.
func TestProbe(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	h := newFakeHost(t)
	h.prove["gvisor"] = errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "a restored sandbox\ndid not answer"), "get another runsc")
	for _, e := range h.probeAll(t.Context()) {
		want := e.Name != "gvisor"
		if e.Probe.Available != want || e.Probe.Isolation == "" || e.Ready {
			t.Errorf("%s is %+v", e.Name, e)
		}
		if !want && (e.Probe.Reason != "a restored sandbox; did not answer" || e.Probe.Remedy != "get another runsc") {
			t.Errorf("%s is %+v", e.Name, e.Probe)
		}
	}
	if left, _ := os.ReadDir(os.Getenv("TMPDIR")); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// TestBrokenRunsc: whatever is in the place of runsc, the probe says what is wrong
// with it and what to do.
func TestBrokenRunsc(t *testing.T) {
	for name, c := range map[string]struct{ script, text string }{
		"fails":     {"exit 1", "exit status 1"},
		"too old":   {"echo runsc version 0.0~20221219.0", "version 0.0~20221219.0, " + gvisor.MinVersion + " or newer is needed"},
		"no runsc":  {"echo hello", "it is no runsc"},
		"no day":    {"echo runsc version VERSION_MISSING", "does not say its version"},
		"no script": {"\x00", "does not work"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := gvisor.LocalRunsc(dir)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte("#!/bin/sh\n"+c.script+"\n"), 0o755)); err != nil {
				t.Fatal(err)
			}
			for _, e := range newEngines(dir).probeAll(t.Context()) {
				if e.Name == gvisor.Name && (e.Probe.Available || !strings.Contains(e.Probe.Reason, c.text) || !strings.Contains(e.Probe.Remedy, "engine install")) {
					t.Errorf("%+v", e.Probe)
				}
			}
		})
	}
}

// runs makes a machine of an engine, and a journal row for it.
func (h *fakeHost) runs(t *testing.T, db *metadata.DB, engineName, state, session string) string {
	t.Helper()
	id := ident.New(ident.Sandbox)
	dir := filepath.Join(h.machines(), id)
	disk := filepath.Join(h.dataDir, "disk")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(disk, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	d, err := h.open(t.Context(), engineName, engineSetup{installation: db.Installation(), logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := d.Boot(t.Context(), engine.Spec{ID: id, Dir: dir, Shape: engine.Shape{CPUs: 1, MemoryMiB: 1}, Root: engine.Root{Disk: disk}}); err != nil {
		t.Fatal(err)
	}
	if state != "" {
		row := metadata.Sandbox{ID: id, State: state, Engine: engineName, Session: session, CreatedAt: time.Now()}
		if err := db.InsertSandboxes(t.Context(), []metadata.Sandbox{row}); err != nil {
			t.Fatal(err)
		}
	}
	return id
}

// TestOtherEnginesInTheDataDirectory: sandboxes that run are counted, those whose
// machine is gone are not, and what a crash left of another engine is ended.
func TestOtherEnginesInTheDataDirectory(t *testing.T) {
	h := newFakeHost(t, "qemu")
	db, err := metadata.Open(t.Context(), metadata.Config{Dir: h.dataDir})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	alive := h.runs(t, db, "gvisor", "running", "")
	gone := h.runs(t, db, "qemu", "running", "")
	h.hosts["qemu"].Crash(gone, "host")
	h.runs(t, db, "qemu", "creating", "")
	h.runs(t, db, "qemu", "running", "private-1")
	h.runs(t, db, "qemu", "", "") // of a pool
	got, err := h.running(t.Context(), db, t.Logf)
	if err != nil || len(got) != 1 || got["gvisor"] != 1 {
		t.Fatalf("running are %v (%v)", got, err)
	}
	if err := h.reapOthers(t.Context(), "gvisor", db, t.Logf); err != nil {
		t.Fatal(err)
	}
	if left := h.hosts["qemu"].Running(); len(left) > 0 {
		t.Errorf("of qemu there are %v", left)
	}
	if left := h.hosts["gvisor"].Running(); len(left) != 1 || left[0] != alive {
		t.Errorf("of gvisor there are %v, want %s", left, alive)
	}
}

// TestOtherEnginesAtRest: a start that finds nothing of other engines starts none of them.
func TestOtherEnginesAtRest(t *testing.T) {
	h := newFakeHost(t, "qemu")
	db, err := metadata.Open(t.Context(), metadata.Config{Dir: h.dataDir})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	h.runs(t, db, "gvisor", "running", "")
	if err := os.MkdirAll(h.dir("qemu"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := h.reapOthers(t.Context(), "gvisor", db, t.Logf); err != nil || h.opens["qemu"] != 0 {
		t.Errorf("opened qemu %d times (%v)", h.opens["qemu"], err)
	}
}

// TestProgramIsGone: where an engine cannot be started any more, a sandbox runs if a
// process of this host names it.
func TestProgramIsGone(t *testing.T) {
	h := newFakeHost(t, "qemu")
	db, err := metadata.Open(t.Context(), metadata.Config{Dir: h.dataDir})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	id := h.runs(t, db, "gvisor", "running", "")
	h.runs(t, db, "gvisor", "running", "")
	h.fail["gvisor"] = errdefs.New(errdefs.ErrUnavailable, "runsc is gone")
	if got, err := h.running(t.Context(), db, t.Logf); err != nil || len(got) != 0 {
		t.Errorf("running are %v (%v)", got, err)
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "read line", "forkd-"+id)
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	if got, err := h.running(t.Context(), db, t.Logf); err != nil || got["gvisor"] != 1 {
		t.Errorf("running are %v (%v)", got, err)
	}
	_ = in.Close()
	_ = cmd.Wait() // it reads to no end
}
