package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

type fakeReport struct {
	Checks []string `json:"checks"`
	failed bool
}

func (f fakeReport) WriteText(w io.Writer) error {
	_, err := fmt.Fprintln(w, "PASS platform")
	return err
}
func (f fakeReport) Failed() bool { return f.failed }

func TestDoctor(t *testing.T) {
	r := newRig(t)
	report := fakeReport{Checks: []string{"platform"}}
	r.change = func(e *Env) {
		e.Doctor = func(context.Context, string) (DoctorReport, error) { return report, nil }
	}
	if got := r.run("doctor"); got != (outcome{0, "PASS platform\n", ""}) {
		t.Errorf("text: %+v", got)
	}
	report.failed = true
	if got := r.run("doctor", "--json"); got != (outcome{1, "{\n  \"checks\": [\n    \"platform\"\n  ]\n}\n", ""}) {
		t.Errorf("JSON: %+v", got)
	}
}

func TestServe(t *testing.T) {
	r := newRig(t)
	var seen ServeOptions
	var fail error
	r.change = func(e *Env) {
		e.Serve = func(_ context.Context, o ServeOptions) error { seen = o; return fail }
	}
	got := r.run("serve", "--listen", "127.0.0.1:1", "--listen", "[::1]:1", "--data-dir", "/d", "--token-file", "/t", "--prepare", "py-base", "--max-sandboxes", "7", "--log-level", "debug")
	want := ServeOptions{Bind: []string{"127.0.0.1:1", "[::1]:1"}, DataDir: "/d", TokenFile: "/t", Prepare: []string{"py-base"}, MaxSandboxes: 7, Engine: "auto", LogLevel: slog.LevelDebug}
	if got.code != 0 || !reflect.DeepEqual(seen, want) {
		t.Errorf("flags: %+v, %+v", got, seen)
	}
	r.env["FORKD_BIND"], r.env["FORKD_MAX_SANDBOXES"], r.env["FORKD_DATA_DIR"] = "127.0.0.1:2", "9", "/e"
	if r.run("serve"); seen.Bind[0] != "127.0.0.1:2" || seen.MaxSandboxes != 9 || seen.DataDir != "/e" {
		t.Errorf("environment: %+v", seen)
	}
	if r.run("serve", "--bind", "127.0.0.1:3", "--max-sandboxes", "1"); seen.Bind[0] != "127.0.0.1:3" || seen.MaxSandboxes != 1 {
		t.Errorf("flags over environment: %+v", seen)
	}
	for _, args := range [][]string{{"--log-level", "loud"}, {"--max-sandboxes", "-1"}, {"--bind", "a", "--listen", "b"}} {
		if got := r.run(append([]string{"serve"}, args...)...); got.code != 2 {
			t.Errorf("%v: %+v", args, got)
		}
	}
	fail = errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "data directory is in use"), "stop the other daemon")
	if got := r.run("serve"); got.code != 1 || got.stderr != "forkd: data directory is in use\nhint: stop the other daemon\n" {
		t.Errorf("failure: %+v", got)
	}
}

func TestCleanup(t *testing.T) {
	r := newRig(t)
	var seen CleanupOptions
	r.change = func(e *Env) {
		e.Cleanup = func(_ context.Context, o CleanupOptions) ([]string, error) {
			seen = o
			return []string{"process 12 of sandbox sb1"}, nil
		}
	}
	if got := r.run("cleanup"); got != (outcome{0, "process 12 of sandbox sb1\n", "forkd: nothing was removed; repeat with -y to remove it\n"}) || seen.Apply {
		t.Errorf("dry: %+v", got)
	}
	if got := r.run("cleanup", "-y", "--json"); got.code != 0 || !seen.Apply {
		t.Errorf("removing: %+v", got)
	}
}

func TestAbsentParts(t *testing.T) {
	r := newRig(t)
	for _, command := range []string{"serve", "doctor", "cleanup"} {
		if got := r.run(command); got.code != 1 || got.stderr != "forkd: "+command+" is not part of this build\n" {
			t.Errorf("%s: %+v", command, got)
		}
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int{"512": 512, "512M": 512, "512MiB": 512, "2G": 2048, "2 GiB": 2048, "1T": 1 << 20} {
		var m mib
		if err := m.Set(text); err != nil || int(m) != want {
			t.Errorf("%q: %d, %v", text, m, err)
		}
	}
	for _, text := range []string{"", "0", "-1", "1.5G", "x", "99999999999999999999", "9999999T", "5K"} {
		var m mib
		if err := m.Set(text); err == nil {
			t.Errorf("%q is %d", text, m)
		}
	}
}

// TestFailedCleanUpIsTold: what a command could not remove is never kept quiet.
func TestFailedCleanUpIsTold(t *testing.T) {
	var stderr lockedBuffer
	a := &app{env: Env{Stderr: &stderr}}
	left, other := errors.New("sandbox is left"), exitWith(3)
	if err := a.after(left, nil); !errors.Is(err, left) {
		t.Errorf("alone: %v", err)
	}
	if err := a.after(left, other); err != other || stderr.String() != "forkd: sandbox is left\n" {
		t.Errorf("with another: %v, %q", err, stderr.String())
	}
}

func TestConfigFiles(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	system, home := filepath.Join(dir, "system.toml"), filepath.Join(dir, "home")
	user := filepath.Join(home, ".config", "forkd", "config.toml")
	if err := os.MkdirAll(filepath.Dir(user), 0o700); err != nil {
		t.Fatal(err)
	}
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(system, "max_sandboxes = 5\nmemory_budget = \"50%\"\n")
	write(user, "max_sandboxes = 6\nurl = \"unix://"+r.socket+"\"\ntoken = \"very-secret\"\n")
	r.env = map[string]string{"HOME": home, "FORKD_BIND": "127.0.0.1:2"}
	var seen ServeOptions
	r.change = func(e *Env) {
		e.SystemConfig = system
		e.Serve = func(_ context.Context, o ServeOptions) error { seen = o; return nil }
	}
	if got := r.run("serve", "--log-level", "warn"); got.code != 0 || seen.MaxSandboxes != 6 || seen.MemoryBudget.Percent != 50 || seen.Bind[0] != "127.0.0.1:2" || seen.LogLevel != slog.LevelWarn {
		t.Errorf("serve: %+v, %+v", got, seen)
	}
	if got := r.run("ls"); got.code != 0 {
		t.Errorf("the address of the file is not used: %+v", got)
	}
	got := r.run("config", "show", "--max-sandboxes", "7")
	text := strings.ReplaceAll(strings.ReplaceAll(strings.ReplaceAll(got.stdout, dir, "DIR"), r.socket, "SOCKET"), "unix://SOCKET", "URL")
	for _, row := range [][]string{
		{"url", "URL", "DIR/home/.config/forkd/config.toml"}, {"token", "(set)"}, {"bind", "127.0.0.1:2", "environment"}, {"max_sandboxes", "7", "flag"},
		{"memory_budget", "50%", "DIR/system.toml"}, {"engine", "auto", "default"},
	} {
		found := false
		for line := range strings.Lines(text) {
			fields := strings.Fields(line)
			found = found || len(fields) >= len(row) && slices.Equal(fields[:len(row)], row)
		}
		if !found {
			t.Errorf("config show lacks %v:\n%s", row, text)
		}
	}
	if strings.Contains(got.stdout, "very-secret") {
		t.Error("the token is shown")
	}
	if got := r.run("config", "show", "--json"); got.code != 0 || !strings.Contains(got.stdout, `"origin": "environment"`) {
		t.Errorf("JSON: %+v", got)
	}
	write(user, "max_sandboxs = 6\n")
	if got := r.run("ls"); got.code != 2 || !strings.Contains(got.stderr, user) || !strings.Contains(got.stderr, `"max_sandboxs"`) {
		t.Errorf("unknown key: %+v", got)
	}
}
