package bench

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// stat writes a process into a made-up proc file system.
func stat(t *testing.T, fs procfs, pid, parent int, ticks [4]int, pages int) {
	t.Helper()
	line := fmt.Sprintf("%d (a) b (c) S %d 1 1 0 -1 4194560 100 0 0 0 %d %d %d %d 20 0 1 0 5000 1000000 %d 18446744073709551615\n",
		pid, parent, ticks[0], ticks[1], ticks[2], ticks[3], pages)
	write(t, fs.path(pid, "stat"), line)
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestProcessorTimeOfTheTree: the daemon, its machines and those it has waited for
// count; others do not.
func TestProcessorTimeOfTheTree(t *testing.T) {
	fs := procfs(t.TempDir())
	stat(t, fs, 1, 0, [4]int{1000, 1000, 0, 0}, 10)
	stat(t, fs, 100, 1, [4]int{1, 2, 30, 40}, 20) // the daemon
	stat(t, fs, 200, 100, [4]int{100, 0, 0, 0}, 30)
	stat(t, fs, 300, 200, [4]int{0, 50, 0, 0}, 30)
	stat(t, fs, 400, 1, [4]int{7000, 0, 0, 0}, 30)
	write(t, filepath.Join(string(fs), "500", "stat"), "damaged")
	write(t, filepath.Join(string(fs), "uptime"), "1 1")
	got, err := fs.cpuSeconds(100)
	if err != nil || got != 2.23 {
		t.Errorf("%v, %v", got, err)
	}
	all, err := fs.all()
	if err != nil {
		t.Fatal(err)
	}
	if pids := slices.Sorted(maps.Keys(tree(all, 100))); !slices.Equal(pids, []int{100, 200, 300}) {
		t.Errorf("tree: %v", pids)
	}
}

func TestTreeEndsInACircle(t *testing.T) {
	all := map[int]process{5: {parent: 6}, 6: {parent: 5}, 7: {parent: 7}, 9: {parent: 3}}
	if got := tree(all, 9); len(got) != 1 {
		t.Errorf("%v", got)
	}
}

func TestDaemonIsFoundByItsMachine(t *testing.T) {
	fs := procfs(t.TempDir())
	const id = "sb00000000000000000001"
	stat(t, fs, 100, 1, [4]int{}, 1)
	stat(t, fs, 200, 100, [4]int{}, 1)
	stat(t, fs, 201, 1, [4]int{}, 1)
	write(t, fs.path(200, "cmdline"), "qemu\x00-name\x00forkd-x-"+id+"\x00")
	write(t, fs.path(201, "cmdline"), "qemu\x00-name\x00forkd-x-"+id+"\x00")
	write(t, fs.path(200, "cgroup"), "9:name=systemd:/\n8:pids:/forkd-x/"+id+"\n0::/\n")
	write(t, fs.path(201, "cgroup"), "0::/\n")
	for _, c := range []struct {
		machine int
		sandbox string
		want    int
	}{{200, id, 100}, {200, "sb99999999999999999999", 0}, {201, id, 0}, {999, id, 0}} {
		if got := fs.daemonOf(c.machine, c.sandbox); got != c.want {
			t.Errorf("machine %d, sandbox %s: %d, want %d", c.machine, c.sandbox, got, c.want)
		}
	}
	if got := fs.groupOf(200, id); got != "forkd-x" {
		t.Errorf("group %q", got)
	}
	if got := fs.groupOf(201, id) + fs.groupOf(999, id); got != "" {
		t.Errorf("group %q of none", got)
	}
}

func TestInspectorCounts(t *testing.T) {
	fs, dir := procfs(t.TempDir()), t.TempDir()
	stat(t, fs, 100, 1, [4]int{}, 256)
	stat(t, fs, 200, 100, [4]int{}, 1)
	fd := fs.path(100, "fd")
	if err := os.MkdirAll(fd, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"0": "/dev/null", "5": "/memfd:snapshot (deleted)", "6": "socket:[1]", "7": "/data/forkd.db-wal"} {
		if err := os.Symlink(target, filepath.Join(fd, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{"sandboxes/sb1", "cg/memory/box/forkd-x/sb1", "cg/memory/box/forkd-y/sb2", "cg/pids/forkd-x/sb1"} {
		if err := os.MkdirAll(filepath.Join(dir, path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	i := &inspector{fs: fs, daemon: 100, sandboxes: filepath.Join(dir, "sandboxes"), cgroups: filepath.Join(dir, "cg"), cgroup: "forkd-x"}
	want := map[string]int{countProcesses: 2, countDescriptors: 3, countMemfds: 1, countCgroups: 2, countDirectories: 1}
	if got := i.counts(); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := i.rss(); got != 256*int64(os.Getpagesize())/1024 {
		t.Errorf("rss %d", got)
	}
	blind := &inspector{fs: fs}
	for name, n := range blind.counts() {
		if n != -1 {
			t.Errorf("%s is %d without a daemon", name, n)
		}
	}
	// A goal that is met ends the wait at once.
	if got, err := i.atRest(context.Background(), want); err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestLeaksAreWhatThereIsMoreOf(t *testing.T) {
	l := newLeaks(map[string]int{"a": 1, "b": 2, "c": -1, "d": 5}, map[string]int{"a": 2, "b": 2, "c": 9, "d": 1})
	if !slices.Equal(l.Leaked, []string{"a"}) || l.text() != "a 1 -> 2" {
		t.Errorf("%+v: %s", l, l.text())
	}
}

func TestGrowth(t *testing.T) {
	for name, c := range map[string]struct {
		samples []RSSSample
		want    *float64
	}{
		"too few":  {[]RSSSample{{100, 10}, {200, 20}}, nil},
		"grown":    {[]RSSSample{{100, 10}, {200, 1000}, {300, 2000}, {400, 1100}}, ptr(10)},
		"less":     {[]RSSSample{{200, 1000}, {300, 900}}, ptr(-10)},
		"no start": {[]RSSSample{{300, 900}, {400, 900}}, nil},
	} {
		got := growth(c.samples)
		if (got == nil) != (c.want == nil) || (got != nil && *got != *c.want) {
			t.Errorf("%s: %v", name, optional(got, "%v"))
		}
	}
}

// FuzzStat: the line holds the name of a process, which anybody chooses.
func FuzzStat(f *testing.F) {
	f.Add([]byte("1 (x) S 0 1 1 0 -1 4194560 100 0 0 0 1 2 3 4 20 0 1 0 5 1 7 1\n"))
	f.Add([]byte("1 (x) y) S"))
	f.Add([]byte(")"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, _ = parseStat(raw)
	})
}
