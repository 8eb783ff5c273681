package runsc

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// scripts puts programs in the place of those of the host.
func scripts(t *testing.T, byName map[string]string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range byName {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\nset -e\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir+":/usr/bin:/bin")
}

// goodHost has an apt and a go that do what is asked of them.
func goodHost() map[string]string {
	return map[string]string{
		"apt-get": `case "$*" in
*update) ;;
*download*) touch runsc_1_amd64.deb ;;
esac`,
		"dpkg-deb": `mkdir -p "$3/usr/bin"; echo 'from debian' > "$3/usr/bin/runsc"`,
		"go": `case "$1 $2" in
"mod init"|"get gvisor"*) ;;
"list -m") echo v0.0.0-20260905035102-160fafc42237 ;;
"list -deps") echo a; echo b; echo c ;;
"build -v") echo a >&2; echo b >&2; echo c >&2
  while [ "$1" != -o ]; do shift; done
  mkdir "$GOTMPDIR/go-build"; chmod 500 "$GOTMPDIR/go-build"
  echo 'from source' > "$2" ;;
esac`,
	}
}

func config(dir string, check error) Config {
	return Config{
		DataDir: dir, Sources: []string{"deb http://mirror.invalid/debian bookworm-backports main"},
		Check: func(dir string) (string, error) {
			_, err := os.Stat(filepath.Join(dir, "libexec", Name))
			return "v1", errors.Join(err, check)
		},
	}
}

// only checks that nothing but the program is there, and what that is.
func only(t *testing.T, dir, want string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "libexec"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	got, _ := os.ReadFile(filepath.Join(dir, "libexec", Name))
	if strings.Join(names, " ") != Name || string(got) != want+"\n" {
		t.Errorf("there is %v, runsc is %q, want it alone and %q", names, got, want)
	}
}

func TestInstall(t *testing.T) {
	scripts(t, goodHost())
	dir := t.TempDir()
	got, err := Debian(t.Context(), config(dir, nil))
	if err != nil || got.Path != filepath.Join(dir, "libexec", Name) || got.Version != "v1" {
		t.Fatalf("%+v, %v", got, err)
	}
	only(t, dir, "from debian")
	var steps []string
	var last float64
	cfg := config(dir, nil)
	cfg.Progress = func(step string, fraction float64) {
		steps = append(steps, step)
		if strings.HasPrefix(step, "building") {
			last = fraction
		}
	}
	if _, err := Newest(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	only(t, dir, "from source")
	if last != 1 || !strings.Contains(strings.Join(steps, ","), "building runsc v0.0.0-20260905035102") {
		t.Errorf("progress up to %v: %q", last, steps)
	}
	info, err := os.Stat(got.Path)
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v (%v)", info.Mode(), err)
	}
}

// TestFailures: whatever fails, the old program stays alone, and the error says what.
func TestFailures(t *testing.T) {
	for name, c := range map[string]struct {
		program, script string
		check           error
		newest          bool
		text            string
		class           error
	}{
		"no mirror":    {program: "apt-get", script: "echo 'E: no route to mirror' >&2; exit 100", text: "no route to mirror", class: errdefs.ErrUnavailable},
		"no package":   {program: "apt-get", script: "exit 0", text: "0 packages", class: errdefs.ErrInternal},
		"bad package":  {program: "dpkg-deb", script: "exit 2", text: "dpkg-deb", class: errdefs.ErrUnavailable},
		"empty":        {program: "dpkg-deb", script: `mkdir "$3"`, text: "look for runsc", class: errdefs.ErrInternal},
		"refused":      {check: errdefs.New(errdefs.ErrUnavailable, "it has version 20221219"), text: "20221219", class: errdefs.ErrUnavailable},
		"no proxy":     {program: "go", script: "echo 'go: 403 Forbidden' >&2; exit 1", newest: true, text: "403 Forbidden", class: errdefs.ErrUnavailable},
		"no build":     {program: "go", script: `case $1 in build) echo '# x' >&2; echo 'x.go:1: bad' >&2; exit 1;; esac`, newest: true, text: "x.go:1: bad", class: errdefs.ErrUnavailable},
		"refused, too": {check: errdefs.New(errdefs.ErrUnavailable, "no"), newest: true, text: "no", class: errdefs.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			host := goodHost()
			if c.program != "" {
				host[c.program] = c.script
			}
			scripts(t, host)
			dir := t.TempDir()
			old(t, dir)
			get := Debian
			if c.newest {
				get = Newest
			}
			_, err := get(t.Context(), config(dir, c.check))
			if err == nil || !strings.Contains(err.Error(), c.text) || !errors.Is(errdefs.Class(err), c.class) {
				t.Errorf("error is %v of class %v, want %v with %q", err, errdefs.Class(err), c.class, c.text)
			}
			only(t, dir, "old")
		})
	}
}

func old(t *testing.T, dir string) {
	t.Helper()
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "libexec"), 0o755), os.WriteFile(filepath.Join(dir, "libexec", Name), []byte("old\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
}

func TestNoToolchain(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := Newest(t.Context(), config(t.TempDir(), nil))
	if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(errdefs.Hint(err), "Debian") {
		t.Errorf("error is %v, hint %q", err, errdefs.Hint(err))
	}
}

// TestCanceled: a build that is interrupted ends with its children and leaves nothing.
func TestCanceled(t *testing.T) {
	host := goodHost()
	pipe := filepath.Join(t.TempDir(), "fifo")
	// The child keeps the output open; the sleep of a shell is not exec'ed.
	host["go"] = strings.Replace(host["go"], `"build -v") `, `"build -v") (sleep 1000; echo) & echo started > `+pipe+`; wait;; "x") `, 1)
	scripts(t, host)
	dir := t.TempDir()
	old(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cfg := config(dir, nil)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	cfg.Progress = func(step string, _ float64) {
		if !strings.HasPrefix(step, "building") {
			return
		}
		go func() { // the build is started after this returns
			for range tick.C {
				if _, err := os.Stat(pipe); err == nil {
					cancel()
					return
				}
			}
		}()
	}
	start := time.Now()
	_, err := Newest(ctx, cfg)
	if !errors.Is(err, context.Canceled) || time.Since(start) > time.Minute {
		t.Errorf("error is %v after %v", err, time.Since(start))
	}
	only(t, dir, "old")
}

// TestStale: what a crash left is removed once it is old.
func TestStale(t *testing.T) {
	scripts(t, goodHost())
	dir := t.TempDir()
	left := filepath.Join(dir, "libexec", stagingPrefix+"1")
	if err := os.MkdirAll(filepath.Join(left, "x"), 0o500); err != nil {
		t.Fatal(err)
	}
	ago := time.Now().Add(-2 * staleAfter)
	if err := os.Chtimes(left, ago, ago); err != nil {
		t.Fatal(err)
	}
	if _, err := Debian(t.Context(), config(dir, nil)); err != nil {
		t.Fatal(err)
	}
	only(t, dir, "from debian")
}
