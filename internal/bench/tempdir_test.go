package bench

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// tempHolder, if set, makes the test binary play a bench that is about to be killed.
const tempHolder = "FORKD_TEST_BENCH_DIR"

// holdTempDir makes a directory, says its name, and waits to be killed.
func holdTempDir(parent string) error {
	d, err := newTempDir(parent)
	if err != nil {
		return err
	}
	if _, err := os.Stdout.WriteString(filepath.Base(d.path)); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin) // without end
	return errors.Join(err, d.remove())
}

// TestKilledBenchIsSwept: the directory of a bench that was killed goes with the next
// one; that of one that runs stays.
func TestKilledBenchIsSwept(t *testing.T) {
	parent := t.TempDir()
	start := func() (*exec.Cmd, string) {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), tempHolder+"="+parent)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdin, err := cmd.StdinPipe() // which ends with us
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = stdin.Close() })
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		name := make([]byte, 100)
		n, err := out.Read(name)
		if err != nil {
			t.Fatal(err)
		}
		return cmd, filepath.Join(parent, string(name[:n]))
	}
	killed, left := start()
	if err := os.WriteFile(filepath.Join(left, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_ = killed.Process.Kill()
	_ = killed.Wait()
	lives, kept := start()
	defer func() {
		_ = lives.Process.Kill()
		_ = lives.Wait()
	}()
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left: %v", left, err)
	}
	d, err := newTempDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
	if err := d.remove(); err != nil {
		t.Error(err)
	}
	if list, _ := os.ReadDir(parent); len(list) != 1 {
		t.Errorf("left are %v", list)
	}
}
