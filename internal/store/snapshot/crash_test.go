package snapshot

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/ident"
)

var errCrash = errors.New("crash")

// disk remembers through the failpoint what was made durable, and can make a copy
// of the directory as a loss of power would leave it.
type disk struct {
	dir     string
	files   map[string]bool // "<id>/<file>" whose bytes are synced
	dirs    map[string]bool // ids whose directory is synced
	renamed [2]string       // a rename that is not synced
	steps   []Step
	crashAt int // index in steps; -1 for never
}

func newDisk(t *testing.T) (*disk, *Store) {
	d := &disk{dir: t.TempDir(), files: map[string]bool{}, dirs: map[string]bool{}, crashAt: -1}
	return d, openStore(t, Config{Dir: d.dir, Failpoint: d.step})
}

// idOf finds the snapshot a name in the store belongs to.
func idOf(name string) string {
	return strings.TrimPrefix(strings.TrimPrefix(name, stagingPrefix), trashPrefix)
}

func fileKey(path string) string {
	return filepath.Join(idOf(filepath.Base(filepath.Dir(path))), filepath.Base(path))
}

func (d *disk) step(step Step, path string) error {
	id := idOf(filepath.Base(path))
	switch step {
	case StepSealArtifact, StepSyncManifest:
		d.files[fileKey(path)] = true
	case StepSyncStaging:
		d.dirs[id] = true
	case StepPublish:
		d.renamed = [2]string{stagingPrefix + id, id}
	case StepTrash:
		d.renamed = [2]string{id, trashPrefix + id}
	case StepSyncPublish, StepSyncTrash:
		d.renamed = [2]string{}
	}
	d.steps = append(d.steps, step)
	if len(d.steps)-1 == d.crashAt {
		return errCrash
	}
	return nil
}

// powerLoss copies the store without what was not synced: bytes, directory
// entries and, if undo says so, a rename (which may also have reached the disk).
func (d *disk) powerLoss(t *testing.T, undo bool) string {
	t.Helper()
	dst := t.TempDir()
	if err := os.CopyFS(dst, os.DirFS(d.dir)); err != nil {
		t.Fatal(err)
	}
	err := filepath.WalkDir(dst, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		key := fileKey(path)
		switch {
		case !d.dirs[filepath.Dir(key)]:
			return os.Remove(path)
		case !d.files[key]:
			return os.Truncate(path, 1)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if undo && d.renamed[0] != "" {
		if err := os.Rename(filepath.Join(dst, d.renamed[1]), filepath.Join(dst, d.renamed[0])); err != nil {
			t.Fatal(err)
		}
	}
	return dst
}

// reopen opens what a crash left: only complete snapshots, and no leftovers.
func reopen(t *testing.T, dir string) *Store {
	t.Helper()
	s := openStore(t, Config{Dir: dir})
	if b := s.Broken(); len(b) != 0 {
		t.Errorf("broken: %v", b)
	}
	for _, m := range s.List() {
		if err := s.Verify(t.Context(), m.ID); err != nil {
			t.Error(err)
		}
		if _, err := s.Chain(m.ID); err != nil {
			t.Error(err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(s.List()) {
		t.Errorf("leftovers: %v (%v)", entries, err)
	}
	return s
}

// crashEverywhere runs op with a crash after each of its steps and checks what the
// crash left. promised is the step after which the outcome must be there.
func crashEverywhere(t *testing.T, prepare, op func(*Store) error, promised Step, outcome bool) {
	probe, s := newDisk(t)
	if err := prepare(s); err != nil {
		t.Fatal(err)
	}
	first := len(probe.steps)
	if err := op(s); err != nil {
		t.Fatal(err)
	}
	steps := probe.steps[first:]
	mustBe := slices.Index(steps, promised)
	if mustBe < 0 {
		t.Fatalf("steps %v without %s", steps, promised)
	}
	for i, step := range steps {
		t.Run(fmt.Sprintf("%d-%s", i, step), func(t *testing.T) {
			d, s := newDisk(t)
			if err := prepare(s); err != nil {
				t.Fatal(err)
			}
			d.crashAt = first + i
			if err := op(s); !errors.Is(err, errCrash) {
				t.Fatalf("no crash: %v", err)
			}
			for _, undo := range []bool{false, true} {
				after := reopen(t, d.powerLoss(t, undo))
				_, err := after.Get(rootID)
				if err != nil {
					t.Errorf("the snapshot beside it is gone: %v", err)
				}
				_, err = after.Get(childID)
				if listed := err == nil; i >= mustBe && listed != outcome {
					t.Errorf("undo %v: listed is %v after %s (%v)", undo, listed, promised, err)
				}
				if err != nil {
					mustPublish(t, after, childID, rootID) // and it can be made again
				}
			}
		})
	}
}

func TestCrashDuringPublish(t *testing.T) {
	crashEverywhere(t,
		func(s *Store) error { return publish(context.Background(), s, rootID, "") },
		func(s *Store) error { return publish(context.Background(), s, childID, rootID) },
		StepSyncPublish, true)
}

func TestCrashDuringRemove(t *testing.T) {
	crashEverywhere(t,
		func(s *Store) error {
			return errors.Join(publish(context.Background(), s, rootID, ""), publish(context.Background(), s, childID, rootID))
		},
		func(s *Store) error { return s.Remove(context.Background(), childID) },
		StepSyncTrash, false)
}

// TestPowerLossLoses makes sure that the simulation is as cruel as it says.
func TestPowerLossLoses(t *testing.T) {
	d, s := newDisk(t)
	mustPublish(t, s, rootID, "")
	delete(d.files, rootID+"/device.state")
	if s := openStore(t, Config{Dir: d.powerLoss(t, false)}); len(s.Broken()) != 1 {
		t.Error("an unsynced file survived")
	}
	delete(d.dirs, rootID)
	if s := openStore(t, Config{Dir: d.powerLoss(t, false)}); len(s.Broken()) != 1 {
		t.Error("an unsynced directory survived")
	}
	d.renamed = [2]string{stagingPrefix + rootID, rootID}
	if s := openStore(t, Config{Dir: d.powerLoss(t, true)}); len(s.List())+len(s.Broken()) != 0 {
		t.Error("an unsynced rename survived")
	}
}

// childDir, if set, makes the test binary play a daemon that is about to be killed.
const childDir = "FORKD_TEST_SNAPSHOT_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		if err := churn(dir); err != nil {
			fmt.Fprintln(os.Stdout, "error", err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// churn publishes and removes until it is killed. It prints "+id" when one is
// published, "?id" before and "-id" after one is removed.
func churn(dir string) error {
	s, err := Open(Config{Dir: dir})
	if err != nil {
		return err
	}
	for {
		first, second := ident.New(ident.Snapshot), ident.New(ident.Checkpoint)
		if err := publish(context.Background(), s, first, ""); err != nil {
			return err
		}
		fmt.Fprintln(os.Stdout, "+"+first)
		if err := publish(context.Background(), s, second, first); err != nil {
			return err
		}
		fmt.Fprintln(os.Stdout, "+"+second)
		fmt.Fprintln(os.Stdout, "?"+second)
		if err := s.Remove(context.Background(), second); err != nil {
			return err
		}
		fmt.Fprintln(os.Stdout, "-"+second)
	}
}

// TestKill9 kills a process at several moments: what it had confirmed is there,
// what it had removed is not, and nothing is half.
func TestKill9(t *testing.T) {
	for _, lines := range []int{41, 42, 43, 44} {
		t.Run(fmt.Sprint(lines), func(t *testing.T) {
			dir := t.TempDir()
			want := killAfter(t, dir, lines)
			s := reopen(t, dir)
			for id, state := range want {
				_, err := s.Get(id)
				if state == "+" && err != nil || state == "-" && err == nil {
					t.Errorf("%s%s: %v", state, id, err)
				}
			}
		})
	}
}

// killAfter returns the last thing that the process said of each snapshot.
func killAfter(t *testing.T, dir string, lines int) map[string]string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childDir+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	n := 0
	for in := bufio.NewScanner(out); in.Scan(); n++ {
		if strings.HasPrefix(in.Text(), "error") {
			t.Error(in.Text())
			continue
		}
		said[in.Text()[1:]] = in.Text()[:1]
		if n == lines {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := cmd.Wait(); err == nil || n < lines {
		t.Fatalf("the process ended by itself after %d lines: %v", n, err)
	}
	return said
}
