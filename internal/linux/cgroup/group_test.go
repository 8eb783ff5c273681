package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// parentFor names a parent of this test process, so that nothing else meets it.
func parentFor() string { return fmt.Sprintf("forkd-test-%d", os.Getpid()) }

func create(t *testing.T, limits Limits) Group {
	t.Helper()
	layout, err := Describe()
	if err != nil {
		t.Fatal(err)
	}
	if missing := 3 - len(layout.Writable("memory", "pids", "cpu")); missing > 0 {
		t.Skipf("needs writable memory, pids and cpu controllers (root, or a delegated unit): mode %s has %v",
			layout.Mode, layout.Writable("memory", "pids", "cpu"))
	}
	g, err := Create(parentFor(), strings.ToLower(t.Name()), limits)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := errors.Join(g.Kill(ctx), g.Remove(ctx)); err != nil {
			t.Error(err)
		}
		for _, d := range g.Dirs() {
			if _, err := os.Stat(d); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", d, err)
			}
		}
	})
	return g
}

// runIn starts a shell that begins script once it is inside of g.
func runIn(t *testing.T, g Group, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sh", "-c", "read go; "+script)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if err := g.AddProcess(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(stdin, "go\n"); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// eventually waits for a state of the kernel that has no event.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	pause := newBackoff()
	for !ok() {
		if pause.wait(ctx) != nil {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func TestMemoryLimitKills(t *testing.T) {
	g := create(t, Limits{MemoryBytes: 32 << 20})
	// tail keeps what it may have to print, so it needs all 200 MiB.
	cmd := runIn(t, g, `head -c 209715200 /dev/zero | tail -c 209715200 >/dev/null`)
	err := cmd.Wait()
	const killed = 128 + int(unix.SIGKILL)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != killed {
		t.Errorf("200 MiB in a group of 32 MiB ended with %v, want a kill", err)
	}
	if n, err := g.OOMKills(); err != nil || n < 1 {
		t.Errorf("%d kills counted (%v), want at least 1", n, err)
	}
}

// TestChange: a group that was made without a limit on processors gets one with its
// process in it, and its other limits go down and up again.
func TestChange(t *testing.T) {
	g := create(t, Limits{MemoryBytes: 512 << 20, PIDs: 100})
	t.Cleanup(func() { // as it is in the end, not as it was made
		all, err := Open(g.Parent, g.Leaf)
		if err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			err = all.Remove(ctx)
		}
		if err != nil {
			t.Error(err)
		}
	})
	cmd := runIn(t, g, `while :; do :; done`)
	for _, l := range []Limits{{MemoryBytes: 64 << 20, PIDs: 5, CPUPercent: 10}, {MemoryBytes: 1 << 30, CPUPercent: 20}, {PIDs: 50}} {
		if err := g.Change(l, cmd.Process.Pid); err != nil {
			t.Fatalf("change to %+v: %v", l, err)
		}
	}
	value := func(v1, v2 string) string {
		path, _, err := g.find(v1, v2)
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	if got := value("memory.limit_in_bytes", "memory.max"); got != "1073741824" {
		t.Errorf("memory is limited to %s", got)
	}
	if got := value("pids.max", "pids.max"); got != "50" {
		t.Errorf("processes are limited to %s", got)
	}
	if got := value("cpu.cfs_quota_us", "cpu.max"); !strings.HasPrefix(got, "20000") {
		t.Errorf("processors are limited to %s", got)
	}
	if got := strings.Fields(value("cgroup.procs", "cgroup.procs")); len(got) != 1 {
		t.Errorf("processes %v are in the group", got)
	}
	for _, d := range g.dirs {
		b, err := os.ReadFile(filepath.Join(d.path, "cgroup.procs"))
		if err != nil || strings.TrimSpace(string(b)) != fmt.Sprint(cmd.Process.Pid) {
			t.Errorf("%s has processes %q, %v", d.path, b, err)
		}
	}
}

func TestMemoryCurrent(t *testing.T) {
	g := create(t, Limits{MemoryBytes: 256 << 20})
	runIn(t, g, `{ head -c 104857600 /dev/zero; exec sleep 100; } | tail -c 104857600 >/dev/null`)
	eventually(t, "100 MiB are charged", func() bool {
		n, err := g.MemoryCurrent()
		return err == nil && n > 100<<20
	})
	if n, err := g.OOMKills(); err != nil || n != 0 {
		t.Errorf("%d kills counted (%v), want 0", n, err)
	}
}

func TestPIDLimit(t *testing.T) {
	g := create(t, Limits{PIDs: 3})
	cmd := runIn(t, g, `sleep 100 & sleep 100 & sleep 100 & echo never`)
	if err := cmd.Wait(); err == nil {
		t.Error("a shell with three children fits into a group of 3")
	}
	if pids, err := g.Procs(); err != nil || len(pids) != 2 {
		t.Errorf("processes %v (%v), want the two children that fit", pids, err)
	}
}

func TestCPULimit(t *testing.T) {
	g := create(t, Limits{CPUPercent: 10})
	runIn(t, g, `while :; do :; done`)
	path, _, err := g.find("cpu.stat", "cpu.stat")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the group was throttled", func() bool {
		n, err := readKeyed(path, "nr_throttled")
		return err == nil && n > 0
	})
}

func TestKillEndsChildrenAndOrphans(t *testing.T) {
	g := create(t, Limits{})
	// The inner shell ends at once, its child becomes an orphan; TERM is ignored.
	cmd := runIn(t, g, `(trap "" TERM; sleep 100 & sleep 100 &) ; sleep 100 & wait`)
	eventually(t, "four processes are there", func() bool {
		pids, err := g.Procs()
		return err == nil && len(pids) == 4
	})
	busy, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if err := g.Remove(busy); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("remove of a group with processes: %v", err)
	}
	if err := g.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if pids, err := g.Procs(); err != nil || len(pids) != 0 {
		t.Errorf("after the kill: %v, %v", pids, err)
	}
	_ = cmd.Wait()
	for range 2 {
		if err := g.Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := g.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFindAgain(t *testing.T) {
	g := create(t, Limits{PIDs: 10, CPUPercent: 50})
	if _, err := Create(g.Parent, g.Leaf, Limits{}); !errors.Is(err, errdefs.ErrConflict) {
		t.Errorf("second creation: %v, want ErrConflict", err)
	}
	again, err := Open(g.Parent, g.Leaf)
	if err != nil || len(again.Dirs()) != len(g.Dirs()) {
		t.Fatalf("open: %+v, %v; created %+v", again, err, g)
	}
	all, err := List(g.Parent)
	if err != nil || len(all) != 1 || all[0].Name() != g.Name() {
		t.Errorf("list: %+v, %v", all, err)
	}
	if _, err := Open(g.Parent, "absent"); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("open of an absent group: %v", err)
	}
	if err := g.AddProcess(1 << 22); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("add a missing process: %v, want ErrNotFound", err)
	}
}

func TestRejects(t *testing.T) {
	for _, name := range []string{"", ".", "..", "a/b", "../x", "-x", strings.Repeat("x", 200), daemonLeaf, "a\n"} {
		if _, err := Create(name, "x", Limits{}); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("parent %q: %v", name, err)
		}
		if _, err := Create("x", name, Limits{}); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("leaf %q: %v", name, err)
		}
	}
	if _, err := Create(parentFor(), "x", Limits{PIDs: -1}); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("negative limit: %v", err)
	}
}

// TestLimitNotApplicable: a limit without its controller fails, and leaves nothing.
func TestLimitNotApplicable(t *testing.T) {
	layout := Layout{Mode: ModeV1, Hierarchies: []Hierarchy{{Version: 1, Mount: t.TempDir(), Own: "/", Controllers: []string{"pids"}, Writable: true}}}
	if _, err := (Limits{MemoryBytes: 1}).controllers(layout); !errors.Is(err, errdefs.ErrUnsupported) || errdefs.Hint(err) == "" {
		t.Errorf("memory limit without its controller: %v", err)
	}
	layout.Hierarchies[0].Writable = false
	if _, err := (Limits{PIDs: 1}).controllers(layout); !errors.Is(err, errdefs.ErrPermission) || errdefs.Hint(err) == "" {
		t.Errorf("pids limit without the right to set it: %v", err)
	}
	if _, err := (Limits{}).controllers(layout); !errors.Is(err, errdefs.ErrUnsupported) {
		t.Errorf("no usable controller: %v", err)
	}
}

// TestV2Files plays a v2 hierarchy with plain files: the host of this test may have none.
func TestV2Files(t *testing.T) {
	root := t.TempDir()
	put := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("unit/cgroup.subtree_control", "memory pids cpu\n")
	controllers := []string{"memory", "pids", "cpu"}
	put("unit/forkd/cgroup.subtree_control", "")
	h := Hierarchy{Version: 2, Mount: root, Own: "/unit", Controllers: controllers, Writable: true}
	g := Group{Parent: "forkd", Leaf: "x"}
	if err := g.makeIn(h, controllers); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"memory.max", "memory.swap.max", "pids.max", "cpu.max"} {
		put("unit/forkd/x/"+name, "max")
	}
	if err := g.apply(Limits{MemoryBytes: 4096, PIDs: 7, CPUPercent: 250}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"unit/forkd/cgroup.subtree_control": "+cpu", // the last of three writes
		"unit/forkd/x/memory.max":           "4096",
		"unit/forkd/x/memory.swap.max":      "0", // written over "max"
		"unit/forkd/x/pids.max":             "7",
		"unit/forkd/x/cpu.max":              "250000 100000",
	} {
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || !strings.HasPrefix(string(b), want) {
			t.Errorf("%s holds %q (%v), want %q", name, b, err, want)
		}
	}
}
