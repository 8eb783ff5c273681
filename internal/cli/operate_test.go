package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
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
