package agent

import (
	"os"
	"path/filepath"
	"testing"
)

func TestHeldFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "hostname")
	h := &heldFile{path: path, mode: 0o644, fd: -1}
	defer h.close()
	step := func(content string) {
		t.Helper()
		if err := h.write(content); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != content {
			t.Fatalf("file holds %q (%v), want %q", b, err, content)
		}
	}
	h.look()
	step("made\n") // there was no file
	h.look()
	inode := h.ino
	step("longer than before\n")
	step("short\n")
	if err := os.WriteFile(path, []byte("written by somebody else, and long\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.look()
	step("ours\n")
	if h.ino != inode {
		t.Fatal("the file was replaced")
	}

	// Somebody puts another file, or a link, in its place.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("another\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.look()
	step("ours again\n")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(filepath.Dir(path), "target"), path); err != nil {
		t.Fatal(err)
	}
	h.look()
	if err := h.write("through a link\n"); err == nil {
		t.Fatal("a link was followed")
	}
}

func TestWorkerRunsAllCalls(t *testing.T) {
	w := newWorker()
	release, done := make(chan struct{}), make(chan int)
	const calls = 10
	for i := range calls {
		w.run(func() {
			<-release // all are under way at once, whoever runs them
			done <- i
		})
	}
	close(release)
	seen := map[int]bool{}
	for range calls {
		seen[<-done] = true
	}
	w.close()
	if len(seen) != calls {
		t.Fatalf("%d of %d calls ran", len(seen), calls)
	}
}

// TestExecsWaitForACapture: no exec gets a group while a capture is under way, and
// an empty leaf needs no freezing.
func TestExecsWaitForACapture(t *testing.T) {
	g := newGroups(t.TempDir(), func(line string) { t.Log(line) })
	if g.close() {
		t.Fatal("an empty leaf would be frozen")
	}
	if _, err := g.newExec(); err != errClosed {
		t.Fatalf("a group during a capture: %v", err)
	}
	g.reopen()
	n, err := g.newExec()
	if err != nil {
		t.Fatal(err)
	}
	if !g.close() {
		t.Fatal("a leaf in use would not be frozen")
	}
	g.reopen()
	g.release(n)
	if g.close() {
		t.Fatal("an empty leaf would be frozen again")
	}
}
