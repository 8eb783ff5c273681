package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
	"forkd.dev/forkd/internal/service"
)

func TestFullHostIsTemporary(t *testing.T) {
	r := newRig(t)
	r.svc.OnFork = func(context.Context, sandbox.Fork) error {
		return errdefs.WithHint(errdefs.New(errdefs.ErrResourceExhausted, "cannot fork 5 sandboxes: 2 more fit"), "ask for fewer")
	}
	o := r.run("fork", "py-base", "-n", "5", "--wait", "1s")
	if o.code != 75 || o.stdout != "" || !strings.Contains(o.stderr, "2 more fit") || !strings.Contains(o.stderr, "hint: ask for fewer") {
		t.Errorf("got %+v", o)
	}
}

// TestErrorsKeepTheirLines: the output of a failed build is readable, and harmless.
func TestErrorsKeepTheirLines(t *testing.T) {
	r := newRig(t)
	r.svc.OnFork = func(context.Context, sandbox.Fork) error {
		return errdefs.New(errdefs.ErrInvalid, "command failed\nfirst \x1b[2Jline\nsecond line\n")
	}
	o := r.run("fork", "py-base")
	if want := "forkd: command failed\n  first [2Jline\n  second line\n"; o.stderr != want {
		t.Errorf("stderr is %q, want %q", o.stderr, want)
	}
}

func TestCompletionWithoutDaemonIsSilent(t *testing.T) {
	r := newRig(t)
	r.noDaemon()
	o := r.run("__complete", "kill", "")
	if o.code != 0 || o.stdout != ":4\n" || strings.Contains(o.stderr, "daemon") {
		t.Errorf("got %+v", o)
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if o := r.run("completion", shell); o.code != 0 || !strings.Contains(o.stdout, "forkd") {
			t.Errorf("completion %s: %d, %d bytes", shell, o.code, len(o.stdout))
		}
	}
}

func TestService(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	r.change = func(e *Env) {
		e.ServiceHost = &service.Host{
			UnitDir: dir, Systemd: true,
			Run:      func(context.Context, string, ...string) (string, error) { return "active\n", nil },
			HasGroup: func(string) bool { return true },
		}
	}
	o := r.run("service", "install", "--binary", "/usr/bin/forkd", "--dry-run")
	if o.code != 0 || !strings.Contains(o.stdout, "ExecStart=/usr/bin/forkd serve") || o.stderr != "forkd: nothing was changed\n" {
		t.Errorf("dry run: %+v", o)
	}
	if o := r.run("service", "install", "--binary", "/usr/bin/forkd", "--no-start"); o.code != 0 || o.stdout != "write "+dir+"/forkd.service\nsystemctl daemon-reload\n" {
		t.Errorf("install: %+v", o)
	}
	if o := r.run("service", "status", "--json"); o.code != 0 || !strings.Contains(o.stdout, `"installed": true`) || !strings.Contains(o.stdout, `"active": "active"`) {
		t.Errorf("status: %+v", o)
	}
	if o := r.run("service", "uninstall", "--json"); o.code != 0 || !strings.Contains(o.stdout, "remove ") {
		t.Errorf("uninstall: %+v", o)
	}
	if o := r.run("service", "uninstall"); o.code != 3 {
		t.Errorf("uninstall again: %+v", o)
	}
	if o := r.run("service", "install", "--binary", "/tmp/forkd"); o.code != 2 || !strings.Contains(o.stderr, "does not see") {
		t.Errorf("a program that goes away: %+v", o)
	}
}

func TestHarmless(t *testing.T) {
	var out bytes.Buffer
	h := &harmless{w: &out}
	// Byte by byte, so that each character comes in pieces.
	for _, b := range []byte("a\x1b[31mé\u009b2J\r\n\t世\xff\x00z") {
		if _, err := h.Write([]byte{b}); err != nil {
			t.Fatal(err)
		}
	}
	if want := "a[31mé2J\n\t世?z"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestFollowEndsWithInterrupt(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	r.svc.OnLogs = func(ctx context.Context, _ sandbox.LogRequest, write func([]byte) error) error {
		if err := write([]byte("line\n")); err != nil {
			return err
		}
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}
	o := r.runContext(ctx, "logs", "-f", "py-base")
	if o.code != 130 {
		t.Errorf("got %+v", o)
	}
}
