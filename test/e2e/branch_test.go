package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	forkd "forkd.dev/forkd/sdk/go"
)

// TestPythonPackageBranches runs testdata/branch.py with the package that upstream
// published: every mode, not waiting, and its documented refusals.
func TestPythonPackageBranches(t *testing.T) {
	w := running(t)
	venv := filepath.Join(t.TempDir(), "venv")
	python := filepath.Join(venv, "bin", "python")
	for _, args := range [][]string{
		{"/usr/bin/python3", "-m", "venv", venv},
		{python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-cache-dir", upstreamPackage},
		{python, "testdata/branch.py"},
	} {
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = w.env()
		got := finish(t, cmd)
		if got.code != 0 {
			t.Fatalf("%v: %+v", args, got)
		}
		t.Log(got.stdout)
	}
}

// answer is what testdata/counter.py says of itself.
type answer struct {
	N    int   `json:"n"`
	Blob int64 `json:"blob"`
	PID  int   `json:"pid"`
	At   int64 `json:"at"`
}

// ask connects to the counter in a sandbox, by the warm interpreter.
func (w *world) ask(t *testing.T, id string) answer {
	t.Helper()
	const code = `
import socket
with socket.create_connection(("127.0.0.1", 7001), 20) as c:
    said = b"".join(iter(lambda: c.recv(4096), b""))
said.decode()
`
	text := w.eval(t, id, code)
	var a answer
	if err := json.Unmarshal([]byte(strings.Trim(text, "'")), &a); err != nil {
		t.Fatalf("the counter of %s said %q: %v", id, text, err)
	}
	return a
}

// counting makes a sandbox in which the counter runs.
func (w *world) counting(t *testing.T) forkd.Sandbox {
	t.Helper()
	program, err := os.ReadFile("testdata/counter.py")
	if err != nil {
		t.Fatal(err)
	}
	sb := w.fork(t, "py-base", 1)[0]
	w.eval(t, sb.ID, fmt.Sprintf("open('/root/counter.py', 'w').write(%s)", strconv.Quote(string(program))))
	w.exec(t, sb.ID, "setsid python3 /root/counter.py >/root/counter.log 2>&1 </dev/null &")
	w.holds(t, sb.ID, "grep -qs 50 /root/open || { cat /root/counter.log; exit 1; }")
	return sb
}

// holds waits until a command in a sandbox succeeds: on a busy host a program of it may
// take minutes to start.
func (w *world) holds(t *testing.T, id, command string) {
	t.Helper()
	err := waitUntil(2*time.Minute, func() error {
		res, err := w.client.Exec(t.Context(), id, forkd.ExecRequest{Args: []string{"sh", "-c", command}})
		if err == nil && res.ExitCode != 0 {
			err = fmt.Errorf("%q in %s ended with %d: %s", command, id, res.ExitCode, res.Stdout)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// lines returns the counts in the open file of the counter, after its first line.
func (w *world) counted(t *testing.T, id string) (head string, counts []string) {
	t.Helper()
	all := strings.Split(strings.TrimSpace(w.exec(t, id, "cat /root/open")), "\n")
	return all[0], all[1:]
}

// TestBranchCounter: a program that counts, holds 50 MiB, an open file with unsynced
// writes and a listening socket is branched while it counts. Its children go on from
// the count with the same blob and file, each for itself; the source goes on; and so
// does a fork of a fork of a fork.
func TestBranchCounter(t *testing.T) {
	w := running(t)
	source := w.counting(t)
	before := w.ask(t, source.ID)
	b := decoded[forkd.BranchResult](t, w, "branch", source.ID, "--tag", "counter")
	t.Cleanup(func() {
		w.killAll(t)
		w.cli(t, "snapshot", "rm", "--cascade", b.ID)
	})
	after := w.ask(t, source.ID)
	t.Logf("count %d to %d; pause %.1f ms, stall %.1f ms, copied %d MiB, layer %d MiB", before.N, after.N, *b.PauseMS, b.StallMS, b.CopiedBytes>>20, b.LayerBytes>>20)
	if b.Status != "ready" || b.BranchedFrom != source.ID || b.StallMS < *b.PauseMS || b.CopiedBytes < 50<<20 || b.LayerBytes < 50<<20 {
		t.Errorf("branch: %+v", b)
	}
	children := w.fork(t, "counter", 3)
	first := []answer{}
	for i, child := range children {
		a := w.ask(t, child.ID)
		if a.N < before.N || a.Blob != before.Blob || a.PID != before.PID {
			t.Errorf("child %d says %+v, the source said %+v before", i, a, before)
		}
		w.exec(t, child.ID, fmt.Sprintf("echo child-%d >/root/mine", i))
		first = append(first, a)
	}
	w.sameFile(t, before, source.ID, children)
	for i, child := range children {
		if again := w.ask(t, child.ID); again.N <= first[i].N || again.Blob != before.Blob {
			t.Errorf("child %d does not go on: %+v, then %+v", i, first[i], again)
		}
		if got := w.exec(t, child.ID, "cat /root/mine"); got != fmt.Sprintf("child-%d\n", i) {
			t.Errorf("child %d has %q", i, got)
		}
	}
	if again := w.ask(t, source.ID); again.N <= after.N || again.Blob != before.Blob {
		t.Errorf("the source does not go on: %+v, then %+v", after, again)
	}
	if got := w.cli(t, "exec", source.ID, "--", "cat", "/root/mine"); got.code == 0 {
		t.Error("the source has a file of its child")
	}
	w.generations(t, children[0].ID, before)
	w.cleanFileSystem(t, source.ID)
	for _, child := range children {
		w.cleanFileSystem(t, child.ID)
	}
}

// cleanFileSystem shuts the file system of a sandbox down and checks it: from outside, on
// a plain copy of its disk. Only a test does that, and of its own guest: forkd itself
// never reads a guest's file system.
func (w *world) cleanFileSystem(t *testing.T, id string) {
	t.Helper()
	w.exec(t, id, "pkill -f counter.py; sync; echo u >/proc/sysrq-trigger")
	w.holds(t, id, "grep -q ' / ext4 ro' /proc/mounts || { cat /proc/mounts; exit 1; }")
	b, err := w.client.Branch(t.Context(), id, forkd.BranchRequest{Mode: "full"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.cli(t, "snapshot", "rm", b.ID)
	info := decoded[forkd.SnapshotDetail](t, w, "snapshot", "info", b.ID)
	disks, err := filepath.Glob(filepath.Join(w.data, "images", info.ImageID, "*.ext4"))
	if err != nil || len(disks) != 1 {
		t.Fatalf("disks of image %s: %v, %v", info.ImageID, disks, err)
	}
	file := func(path string) map[string]any { return map[string]any{"driver": "file", "filename": path} }
	layers, err := filepath.Glob(filepath.Join(info.Dir, "*.qcow2")) // in order of their names, lowest first
	if err != nil || len(layers) == 0 {
		t.Fatalf("disk layers in %s: %v, %v", info.Dir, layers, err)
	}
	disk := map[string]any{"driver": "raw", "file": file(disks[0])}
	for _, layer := range layers {
		disk = map[string]any{"driver": "qcow2", "file": file(layer), "backing": disk}
	}
	stack, err := json.Marshal(disk)
	if err != nil {
		t.Fatal(err)
	}
	raw := filepath.Join(t.TempDir(), "disk")
	for _, args := range [][]string{{"qemu-img", "convert", "-O", "raw", "json:" + string(stack), raw}, {"e2fsck", "-fn", raw}} {
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Errorf("%s of the disk of %s: %v\n%s", args[0], id, err, out)
		}
	}
	if err := os.Remove(raw); err != nil {
		t.Error(err)
	}
}

// sameFile: up to the branch the open file is the same everywhere, and no line is torn
// or missing in it.
func (w *world) sameFile(t *testing.T, before answer, source string, children []forkd.Sandbox) {
	t.Helper()
	wantHead, _ := w.counted(t, source)
	for i, child := range children {
		head, counts := w.counted(t, child.ID)
		if head != wantHead || len(counts) < before.N {
			t.Errorf("child %d has %d counts, %d were written before the branch", i, len(counts), before.N)
		}
		for n, line := range counts {
			if line != strconv.Itoa(n+1) {
				t.Errorf("child %d: line %d of its file is %q", i, n+1, line)
				break
			}
		}
	}
}

// generations forks a running sandbox three deep, with three children each time. The
// snapshots behind go with their sandboxes.
func (w *world) generations(t *testing.T, id string, before answer) {
	t.Helper()
	list := func() []forkd.Snapshot {
		all, err := w.client.Snapshots(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	had := len(list())
	var born []string
	last := w.ask(t, id)
	for range 3 {
		w.exec(t, id, "echo x >>/root/generation")
		ids := strings.Fields(w.must(t, "fork", id, "-n", "3"))
		if len(ids) != 3 {
			t.Fatalf("fork of %s printed %v", id, ids)
		}
		born = append(born, ids...)
		id = ids[2]
		now := w.ask(t, id)
		if now.N < last.N || now.Blob != before.Blob {
			t.Errorf("after %+v its fork says %+v", last, now)
		}
		last = now
	}
	if got := w.exec(t, id, "cat /root/generation"); got != "x\nx\nx\n" {
		t.Errorf("the last generation has %q", got)
	}
	w.answers(t, id)
	w.cleanFileSystem(t, id)
	w.must(t, append([]string{"kill"}, born...)...)
	if now := len(list()); now != had {
		t.Errorf("%d snapshots are left of %d", now, had)
	}
}

// TestLayersOfBranches: what lies on a branch keeps it, a compacted copy does not, and
// digests are checked and damage is found on real files.
func TestLayersOfBranches(t *testing.T) {
	w := running(t)
	sb := w.fork(t, "py-base", 1)[0]
	w.eval(t, sb.ID, "level = 1\nlevel")
	w.must(t, "branch", sb.ID, "--tag", "layer-1")
	w.eval(t, sb.ID, "level = 2\nlevel")
	w.must(t, "branch", sb.ID, "--tag", "layer-2")
	t.Cleanup(func() {
		w.killAll(t)
		w.cli(t, "snapshot", "rm", "--cascade", "layer-1")
		w.cli(t, "snapshot", "rm", "layer-flat")
	})
	w.must(t, "kill", sb.ID)
	info := decoded[forkd.SnapshotDetail](t, w, "snapshot", "info", "layer-2")
	if info.ChainDepth != 2 || !slices.Equal(info.Ancestors, []string{"py-base", "layer-1"}) || info.ChainBytes <= info.MemoryBytes || info.Disk != "journal" {
		t.Errorf("info: %+v", info)
	}
	flat := decoded[forkd.Snapshot](t, w, "snapshot", "compact", "layer-2", "--to", "layer-flat")
	if flat.ChainDepth != 0 || flat.ParentID != "" {
		t.Errorf("compacted: %+v", flat)
	}
	for _, tag := range []string{"layer-2", "layer-flat"} {
		if got := w.eval(t, w.fork(t, tag, 1)[0].ID, "level"); got != "2" {
			t.Errorf("level in a fork of %s is %s", tag, got)
		}
	}
	w.killAll(t)
	if res := decoded[forkd.VerifyResult](t, w, "verify", "layer-2"); res.Damaged != 0 || len(res.Checked) != 4 {
		t.Errorf("verify: %+v", res)
	}
	usage := decoded[forkd.DiskUsage](t, w, "df")
	i := slices.IndexFunc(usage.Snapshots, func(s forkd.SnapshotUse) bool { return s.ID == info.ID })
	if i < 0 || usage.Snapshots[i].SharedBytes == 0 || usage.Snapshots[i].OwnBytes == 0 || usage.FreeBytes == 0 || usage.ImageBytes == 0 {
		t.Errorf("df: %+v", usage)
	}
	w.damage(t, info)
}

// damage changes one byte of a layer's data and has it found.
func (w *world) damage(t *testing.T, sn forkd.SnapshotDetail) {
	t.Helper()
	layer := filepath.Join(sn.Dir, "memory.layer")
	f, err := os.OpenFile(layer, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var one [1]byte
	if _, err := f.ReadAt(one[:], 8192); err != nil {
		t.Fatal(err)
	}
	one[0] ^= 1
	if _, err := f.WriteAt(one[:], 8192); err != nil {
		t.Fatal(err)
	}
	if got := w.cli(t, "verify", "layer-2", "--repair"); got.code != 1 || strings.TrimSpace(got.stdout) != sn.ID {
		t.Errorf("verify of a damaged layer: %+v", got)
	}
	if got := w.cli(t, "fork", "layer-2"); got.code != 1 || !strings.Contains(got.stderr, "failed") {
		t.Errorf("fork of a damaged snapshot: %+v", got)
	}
	if got := w.cli(t, "snapshot", "rebuild", "layer-2"); got.code == 0 || !strings.Contains(got.stderr, "no recipe") {
		t.Errorf("rebuild of a branch: %+v", got)
	}
	w.answers(t, w.fork(t, "layer-1", 1)[0].ID)
}

// TestPack: a branch of a running program goes to another data directory as one file,
// where its forks go on counting.
func TestPack(t *testing.T) {
	w := running(t)
	source := w.counting(t)
	w.must(t, "branch", source.ID, "--tag", "packed")
	t.Cleanup(func() {
		w.killAll(t)
		w.cli(t, "snapshot", "rm", "packed")
	})
	before := w.ask(t, source.ID)
	file := filepath.Join(t.TempDir(), "packed.forkd")
	w.must(t, "pack", "packed", "-o", file)
	st, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the pack has %d MiB", st.Size()>>20)
	other := w.elsewhere(t)
	cut := filepath.Join(t.TempDir(), "cut.forkd")
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cut, whole[:len(whole)-1000], 0o600); err != nil {
		t.Fatal(err)
	}
	if got := other.cli(t, "unpack", cut); got.code != 1 || !strings.Contains(got.stderr, "cut off") {
		t.Errorf("unpack of a file that was cut: %+v", got)
	}
	if left := other.must(t, "snapshot", "ls") + other.must(t, "image", "ls"); left != "" {
		t.Errorf("a refused pack left %s", left)
	}
	other.must(t, "unpack", file)
	for _, sb := range other.fork(t, "packed", 2) {
		if a := other.ask(t, sb.ID); a.Blob != before.Blob || a.PID != before.PID || a.N == 0 {
			t.Errorf("elsewhere the counter says %+v, here %+v", a, before)
		}
		other.answers(t, sb.ID)
	}
	if res := decoded[forkd.VerifyResult](t, other, "verify"); res.Damaged != 0 || len(res.Checked) != 3 {
		t.Errorf("verify elsewhere: %+v", res)
	}
	other.killAll(t)
}

// elsewhere is a daemon with another, empty data directory.
func (w *world) elsewhere(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "forkd-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	o := &world{dir: dir, bin: w.bin, data: filepath.Join(dir, "data"), tmp: w.tmp}
	if o.addr, err = freeAddress(); err != nil {
		t.Fatal(err)
	}
	if o.client, err = forkd.New(forkd.Options{BaseURL: o.url()}); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(o.logPath())
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(o.bin, "serve", "--data-dir", o.data, "--bind", o.addr)
	cmd.Env, cmd.Stdout, cmd.Stderr = o.env(), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(exited)
	}()
	o.daemon, o.exited = cmd, exited
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log of the other daemon:\n%s", o.logTail())
		}
		if err := o.endSandboxes(); err != nil {
			t.Error(err)
		}
		if err := o.end(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := o.await(startPatience, o.client.Health); err != nil {
		t.Fatal(err)
	}
	return o
}
