package bench

import (
	"context"
	"errors"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

func shell(script string) command {
	return func(ctx context.Context, i int) *exec.Cmd {
		return exec.CommandContext(ctx, "/bin/sh", "-c", script, "sh", strconv.Itoa(i))
	}
}

func TestBaselineRunsAllAndChecksEach(t *testing.T) {
	got, err := shell("echo 1.24.2").measure(t.Context(), 5, "1.24.2")
	if err != nil || got.totalMS <= 0 {
		t.Errorf("%+v, %v", got, err)
	}
	_, err = shell(`test "$1" = 3 && echo 9.9 || echo 1.24.2`).measure(t.Context(), 5, "1.24.2")
	if !errors.Is(err, ErrAnswers) || !strings.Contains(err.Error(), "9.9") {
		t.Errorf("one wrong answer: %v", err)
	}
	_, err = shell("echo it broke >&2; exit 7").measure(t.Context(), 5, "1.24.2")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 7 || !strings.Contains(err.Error(), "it broke") {
		t.Errorf("failed program: %v", err)
	}
}

func TestBaselineEndsWhenCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c := func(ctx context.Context, _ int) *exec.Cmd {
		cancel()
		return exec.CommandContext(ctx, "/bin/sleep", "600")
	}
	if _, err := command(c).measure(ctx, 50, "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func TestOutputIsBounded(t *testing.T) {
	var h head
	for range 1000 {
		if n, err := h.Write([]byte("0123456789")); n != 10 || err != nil {
			t.Fatal(n, err)
		}
	}
	if h.Len() != maxOutput {
		t.Errorf("kept %d bytes", h.Len())
	}
}

// TestBaselineThatFailsAtFirstIsSkipped: with the reason, and the other one stays.
func TestBaselineThatFailsAtFirstIsSkipped(t *testing.T) {
	o := &opponents{process: shell("echo 2.0.0"), runc: shell("echo 1.24.2"), want: "1.24.2"}
	if err := o.rehearse(t.Context()); err != nil {
		t.Fatal(err)
	}
	if o.process != nil || !strings.Contains(o.about.Process.Skipped, "2.0.0") || o.runc == nil || o.about.Runc.Skipped != "" {
		t.Errorf("%+v", o.about)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := o.rehearse(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
