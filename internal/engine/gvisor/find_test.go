package gvisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// program writes a script in the place of runsc and returns the data directory.
func program(t *testing.T, script string) string {
	t.Helper()
	dir := t.TempDir()
	path := LocalRunsc(dir)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestFindRunscTakesWhatIsNewEnough(t *testing.T) {
	for _, version := range []string{"0.0~20240729.0", "release-20260101.0", "v0.0.0-20260905035102-160fafc42237"} {
		dir := program(t, fmt.Sprintf(`echo "runsc version %s"; echo "spec: 1.1.0"`, version))
		path, got, err := FindRunsc(dir)
		if err != nil || got != version || path != LocalRunsc(dir) {
			t.Errorf("%s: found %q with version %q, error %v", version, path, got, err)
		}
	}
}

func TestFindRunscNamesWhatIsWrong(t *testing.T) {
	for what, c := range map[string]struct{ script, text string }{
		"too old":             {`echo "runsc version 0.0~20221219.0"`, "20221219"},
		"no version":          {`echo "runsc version VERSION_MISSING"`, "VERSION_MISSING"},
		"another program":     {`echo "hello"`, "no runsc"},
		"a program that dies": {`exit 3`, "exit status 3"},
	} {
		_, _, err := FindRunsc(program(t, c.script))
		if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), c.text) || errdefs.Hint(err) == "" {
			t.Errorf("%s: error is %v (hint %q), want class unavailable with %q", what, err, errdefs.Hint(err), c.text)
		}
	}
}

// TestRunscThatHangs: neither it nor a child of it is waited for.
func TestRunscThatHangs(t *testing.T) {
	dir := program(t, "sleep 1000")
	_, err := runscVersion(LocalRunsc(dir), 100*time.Millisecond)
	if !errors.Is(err, errdefs.ErrTimeout) || !strings.Contains(err.Error(), "did not answer") {
		t.Errorf("error is %v", err)
	}
}

func TestFindRunscWithoutOne(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, _, err := FindRunsc(t.TempDir()); !errors.Is(err, errdefs.ErrUnavailable) || errdefs.Hint(err) == "" {
		t.Errorf("error is %v, want class unavailable with a hint", err)
	}
}
