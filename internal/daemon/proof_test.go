package daemon

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

// TestRememberedProof: a proof is made once for each thing it depends on, a failure
// is not remembered, and nothing in the file's place does harm.
func TestRememberedProof(t *testing.T) {
	dir := t.TempDir()
	calls := 0
	var fail error
	prove := func(context.Context) error { calls++; return fail }
	key := proofKey{Program: "p", Kernel: "6.1", Agent: "a"}
	ask := func(key proofKey, want int) {
		t.Helper()
		if err := remembered(t.Context(), dir, key, prove); !errors.Is(err, fail) || calls != want {
			t.Errorf("%v after %d proofs, want %d", err, calls, want)
		}
	}
	fail = errors.New("not now")
	ask(key, 1)
	ask(key, 2)
	fail = nil
	ask(key, 3)
	ask(key, 3)
	for _, other := range []proofKey{{"q", "6.1", "a", 0}, {"p", "6.2", "a", 0}, {"p", "6.1", "b", 0}, {"p", "6.1", "a", 1000}} {
		before := calls
		ask(other, before+1)
		ask(other, before+1)
	}
	path := filepath.Join(dir, proofFile)
	for _, bad := range []string{"", "{", "[]", string(make([]byte, 1<<20))} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		before := calls
		ask(key, before+1)
		ask(key, before+1)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left %v (%v)", entries, err)
	}
	// Without the directory there is nothing to remember it in.
	if err := remembered(t.Context(), filepath.Join(dir, "none"), key, prove); err != nil {
		t.Error(err)
	}
}

func TestProgramDigest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p")
	if err := os.WriteFile(path, []byte("abc"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := programDigest(path); err != nil || got != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := programDigest(path + "x"); err == nil {
		t.Error("a program that is not there has a digest")
	}
}

// TestEmptyTree: the root of a proof is an EROFS file, and a missing tool is named.
func TestEmptyTree(t *testing.T) {
	if _, err := exec.LookPath("mkfs.erofs"); err != nil {
		t.Skip("mkfs.erofs is not installed")
	}
	path, err := emptyTree(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	const magic = "\xe2\xe1\xf5\xe0" // EROFS_SUPER_MAGIC_V1 at 1024, uapi/linux/magic.h
	if err != nil || len(b) < 2048 || string(b[1024:1028]) != magic {
		t.Errorf("%d bytes (%v)", len(b), err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := emptyTree(t.Context(), t.TempDir()); !errors.Is(err, errdefs.ErrUnavailable) || errdefs.Hint(err) == "" {
		t.Errorf("without mkfs.erofs: %v", err)
	}
}
