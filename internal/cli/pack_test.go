package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPack(t *testing.T) {
	r := newRig(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "x.forkd")
	if got := r.run("pack", "py-base", "-o", file, "--json"); got.code != 0 || !strings.Contains(got.stdout, `"bytes": 31`) {
		t.Fatalf("pack: %+v", got)
	}
	st, err := os.Stat(file)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the file is %v, %v", st.Mode(), err)
	}
	streamed := r.run("pack", "py-base", "-o", "-")
	if whole, err := os.ReadFile(file); err != nil || streamed.stdout != string(whole) {
		t.Errorf("standard output has %d bytes, the file %d: %v", len(streamed.stdout), len(whole), err)
	}
	if got := r.run("unpack", file, "--tag", "theirs"); got.code != 0 || got.stdout != "sn00000000000000000002\n" {
		t.Errorf("unpack: %+v", got)
	}
	for _, c := range []struct {
		code  int
		piece string
		args  []string
	}{
		{1, "taken", []string{"unpack", file, "--tag", "theirs"}},
		{0, "", []string{"unpack", file, "--tag", "theirs", "--force"}},
		{3, "no such file", []string{"unpack", filepath.Join(dir, "absent")}},
		{3, "no snapshot", []string{"pack", "absent", "-o", filepath.Join(dir, "y")}},
		{2, "create file", []string{"pack", "py-base", "-o", filepath.Join(dir, "absent", "y")}},
		{2, "name a snapshot", []string{"pack"}},
	} {
		if got := r.run(c.args...); got.code != c.code || !strings.Contains(got.stdout+got.stderr, c.piece) {
			t.Errorf("forkd %s: %+v, want code %d and %q", strings.Join(c.args, " "), got, c.code, c.piece)
		}
	}
	r.stdin = streamed.stdout
	if got := r.run("unpack", "-", "-t", "piped"); got.code != 0 {
		t.Errorf("unpack of standard input: %+v", got)
	}
	r.stdin = "something else"
	if got := r.run("unpack", "-", "-t", "odd"); got.code != 1 || !strings.Contains(got.stderr, "no pack") {
		t.Errorf("unpack of something else: %+v", got)
	}
	r.tty = true
	if got := r.run("pack", "py-base", "-o", "-"); got.code != 2 || !strings.Contains(got.stderr, "terminal") {
		t.Errorf("pack to a terminal: %+v", got)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left are %v, %v", left, err)
	}
}
