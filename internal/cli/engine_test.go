package cli

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/doctor"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/frontend/rest"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
)

// twoEngines is a host on which one of them works.
func twoEngines(_ context.Context, setting string) (doctor.EngineList, error) {
	return doctor.EngineList{
		Engine: doctor.Choice{Auto: "qemu", Reason: "that is so", Setting: setting},
		Engines: []doctor.EngineInfo{
			{Name: "gvisor", Reason: "runsc has version 20221219", Remedy: "get another"},
			{Name: "qemu", Available: true, Ready: true, Version: "QEMU 7", Accelerator: "tcg", Isolation: engine.IsolationEmulated, SharesMemory: true, Reason: "it works"},
		},
	}, nil
}

func TestEngineList(t *testing.T) {
	r := newRig(t)
	r.change = func(e *Env) { e.Engines = twoEngines }
	got := r.run("engine", "ls")
	if got.code != 0 || got.stdout != "qemu\n" || !strings.Contains(got.stderr, "auto = qemu: that is so") {
		t.Errorf("piped: %+v", got)
	}
	var list doctor.EngineList
	if got := r.run("engine", "ls", "--json", "--engine", "gvisor"); json.Unmarshal([]byte(got.stdout), &list) != nil ||
		list.Engine.Setting != "gvisor" || len(list.Engines) != 2 || got.stderr != "" {
		t.Errorf("JSON: %+v", got)
	}
	r.tty = true
	got = r.run("engine", "ls")
	lines := strings.Split(got.stdout, "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[1], "gvisor  no") || !strings.Contains(lines[1], "runsc has version 20221219 -> get another") ||
		!strings.HasPrefix(lines[2], "qemu *  yes    QEMU 7") || !strings.Contains(lines[2], "shared") {
		t.Errorf("table:\n%s", got.stdout)
	}
	r.env["FORKD_ENGINE"] = "gvisor"
	if got := r.run("engine", "ls"); !strings.Contains(got.stdout, "gvisor *") || strings.Contains(got.stdout, "qemu *") {
		t.Errorf("with another set:\n%s", got.stdout)
	}
}

func TestEngineInstall(t *testing.T) {
	r := newRig(t)
	var seen InstallOptions
	r.change = func(e *Env) {
		e.InstallEngine = func(_ context.Context, o InstallOptions) (Installed, error) {
			seen = o
			o.Progress("building", 0.5)
			return Installed{Engine: o.Engine, Path: "/data/libexec/runsc", Version: "20260101", Source: "somewhere"}, nil
		}
	}
	got := r.run("engine", "install", "gvisor", "--newest")
	if got.code != 0 || got.stdout != "/data/libexec/runsc\n" || !strings.Contains(got.stderr, "installed gvisor 20260101 from somewhere") || !seen.Newest || seen.Engine != "gvisor" {
		t.Errorf("%+v, options %+v", got, seen)
	}
	if got := r.run("engine", "install", "gvisor", "--json"); got.code != 0 || !strings.Contains(got.stdout, `"version": "20260101"`) || seen.Newest {
		t.Errorf("JSON: %+v", got)
	}
	if got := r.run("engine", "install", "qemu"); got.code != 1 || !strings.Contains(got.stderr, "apt-get install") {
		t.Errorf("qemu: %+v", got)
	}
	for _, args := range [][]string{{"engine", "install"}, {"engine", "install", "kvm"}, {"engine", "install", "gvisor", "x"}} {
		if got := r.run(args...); got.code != 2 {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

// TestEngineOfTheDaemon: --engine of a command that would start a daemon is kept to
// if there is one already.
func TestEngineOfTheDaemon(t *testing.T) {
	r := newRig(t)
	h, err := rest.New(rest.Config{Service: r.svc, Version: "daemon-test", Engine: "qemu"})
	if err != nil {
		t.Fatal(err)
	}
	r.env["FORKD_URL"] = "unix://" + resttest.ServeUnix(t, h)
	got := r.run("run", "--engine", "gvisor", "--", "true")
	if got.code != exitOwn || !strings.Contains(got.stderr, "runs engine qemu, not gvisor") || !strings.Contains(got.stderr, "hint: ") {
		t.Errorf("another: %+v", got)
	}
	for _, args := range [][]string{{"--engine", "qemu"}, {"--engine", "auto"}, nil} {
		r.env["FORKD_ENGINE"] = "gvisor" // is said to daemons that are started
		if len(args) > 0 {
			delete(r.env, "FORKD_ENGINE")
		}
		if got := r.run(append(append([]string{"run"}, args...), "--", "true")...); got.code != 0 {
			t.Errorf("%v: %+v", args, got)
		}
	}
	if got := r.run("demo", "--engine", "bhyve"); got.code != 2 || !strings.Contains(got.stderr, "there is no engine") {
		t.Errorf("unknown: %+v", got)
	}
}

// TestEngineOfAPrivateDaemon: it is started with the engine that is asked for.
func TestEngineOfAPrivateDaemon(t *testing.T) {
	r := newRig(t)
	socket := r.socket
	r.env, r.alone = map[string]string{}, true
	if got := r.run("version"); !strings.Contains(got.stdout, "daemon none") {
		t.Fatalf("a daemon is found: %+v", got)
	}
	var asked []string
	r.change = func(e *Env) {
		e.StartPrivateDaemon = func(_ context.Context, engine string) (string, func() error, error) {
			asked = append(asked, engine)
			if engine == "kvm" {
				return "", nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "no kvm"), "use another")
			}
			return socket, func() error { return nil }, nil
		}
	}
	if got := r.run("run", "--engine", "gvisor", "--", "true"); got.code != 0 {
		t.Errorf("%+v", got)
	}
	if got := r.run("run", "--engine", "kvm", "--", "true"); got.code != exitOwn || !strings.Contains(got.stderr, "no kvm") {
		t.Errorf("%+v", got)
	}
	if strings.Join(asked, ",") != "gvisor,kvm" {
		t.Errorf("asked for %v", asked)
	}
}
