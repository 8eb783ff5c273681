package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/doctor"
)

// TestEngineList: every engine is listed, with what it needs if it does not work here.
func TestEngineList(t *testing.T) {
	w := running(t)
	list := decoded[doctor.EngineList](t, w, "engine", "ls")
	seen := map[string]doctor.EngineInfo{}
	for _, e := range list.Engines {
		seen[e.Name] = e
		if !e.Available && (e.Reason == "" || e.Remedy == "") || e.Available && (e.Isolation == "" || e.Version == "" || e.Accelerator == "") {
			t.Errorf("%+v", e)
		}
	}
	if len(seen) != 3 || !seen["qemu"].Available || !seen["qemu"].SharesMemory || list.Engine.Auto == "" || !seen[list.Engine.Auto].Available || !seen[list.Engine.Auto].Ready {
		t.Errorf("%+v", list)
	}
	version := decoded[map[string]string](t, w, "version")
	if version["daemon"] == "" {
		t.Errorf("version is %v", version)
	}
	report := decoded[doctor.Report](t, w, "doctor", "--engine", "qemu")
	if report.Engine.Setting != "qemu" || report.Failed() {
		t.Errorf("doctor: %+v", report)
	}
}

// TestEngineRefused: what cannot be is said at once, with the way out.
func TestEngineRefused(t *testing.T) {
	w := alone(t)
	serve := func(env []string, args ...string) outcome {
		t.Helper()
		data := filepath.Join(t.TempDir(), "data")
		if err := os.Mkdir(data, 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(w.bin, append([]string{"serve", "--bind", w.addr, "--data-dir", data}, args...)...)
		cmd.Env = w.env(env...)
		return finish(t, cmd)
	}
	for _, got := range []outcome{serve(nil, "--engine", "bhyve"), serve([]string{"FORKD_ENGINE=bhyve"})} {
		if got.code != 2 && got.code != 1 || !strings.Contains(got.stderr, `there is no engine "bhyve"`) {
			t.Errorf("%+v", got)
		}
	}
	// A host whose runsc fails, hangs in its version, or is too old.
	for script, text := range map[string]string{"exit 1": "exit status 1", "echo runsc version 0.0~20221219.0": "20221219"} {
		bin := t.TempDir()
		if err := os.WriteFile(filepath.Join(bin, "runsc"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		got := serve([]string{"PATH=" + bin + ":" + os.Getenv("PATH")}, "--engine", "gvisor")
		if got.code != 1 || !strings.Contains(got.stderr, text) || !strings.Contains(got.stderr, "hint: get one with: forkd engine install gvisor") {
			t.Errorf("%q: %+v", script, got)
		}
	}
	w.restart(t)
	if got := w.cli(t, "run", "--engine", "gvisor", "--", "true"); got.code != 125 || !strings.Contains(got.stderr, "runs engine qemu, not gvisor") {
		t.Errorf("a daemon of another engine: %+v", got)
	}
}

// TestEngineOfRunningSandboxes: a daemon of another engine does not take over what
// runs, and touches none of it.
func TestEngineOfRunningSandboxes(t *testing.T) {
	w := running(t)
	sb := w.fork(t, "py-base", 1)[0]
	w.stop(t)
	cmd := exec.Command(w.bin, "serve", "--bind", w.addr, "--data-dir", w.data, "--engine", "kvm")
	cmd.Env = w.env()
	got := finish(t, cmd)
	if got.code != 1 || !strings.Contains(got.stderr, "1 sandboxes of engine qemu run on the data directory") || !strings.Contains(got.stderr, "hint: start the daemon with --engine qemu") {
		t.Errorf("%+v", got)
	}
	if len(machines(w.data)) == 0 {
		t.Error("the sandbox is gone")
	}
	w.restart(t)
	w.must(t, "ping", sb.ID)
	w.killAll(t)
}
