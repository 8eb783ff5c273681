package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	forkd "forkd.dev/forkd/sdk/go"
)

// rollbackSetup gives the runner a region of memory, a file, a process and a seeded
// generator, and says what all of it looks like.
const rollbackSetup = `
import hashlib, json, os, random, socket, subprocess
blob = bytearray(os.urandom(4 << 20))
with open("/root/data", "wb") as f: f.write(os.urandom(1 << 20))
child = subprocess.Popen(["sleep", "100000"])
count = 0
random.seed(7)
def state():
    procs = []
    for p in os.listdir("/proc"):
        if p.isdigit():
            try: procs.append(open("/proc/%s/cmdline" % p).read().replace("\0", " ").strip())
            except OSError: pass
    return {
        "memory": hashlib.sha256(blob).hexdigest(), "count": count,
        "file": hashlib.sha256(open("/root/data", "rb").read()).hexdigest(), "files": sorted(os.listdir("/root")),
        "processes": sorted(p for p in procs if p), "hostname": socket.gethostname(),
        "token": open("/run/forkd/token").read(), "machine": open("/etc/machine-id").read(),
    }
def draw():
    return {"seeded": [random.random() for _ in range(4)], "kernel": os.urandom(16).hex(), "generation": int(open("/run/forkd/generation").read())}
def spoil():
    global count
    r = random.SystemRandom()
    for _ in range(300):
        at = r.randrange(len(blob)); blob[at] ^= 1 + r.randrange(255)
    for i in range(5):
        with open("/root/junk%d" % r.randrange(1000), "wb") as f: f.write(os.urandom(r.randrange(200000)))
    with open("/root/data", "r+b") as f:
        f.seek(r.randrange(1 << 20)); f.write(b"spoiled")
    subprocess.Popen(["sleep", str(r.randrange(1000, 9999))])
    count += 1
    if r.randrange(2): os.sync()
    if r.randrange(4) == 0: child.kill()
    return count
True`

// drawn is what draw gives.
type drawn struct {
	Seeded     []float64
	Kernel     string
	Generation uint64
}

// evalJSON evaluates an expression in a sandbox and decodes its value.
func evalJSON[T any](t *testing.T, w *world, id, code string) T {
	t.Helper()
	res, err := w.client.Eval(t.Context(), id, forkd.EvalRequest{Code: "print(json.dumps(" + code + "))"})
	if err != nil || res.Error != nil {
		t.Fatalf("eval %s in %s: %v, %s", code, id, err, text(res.Error))
	}
	var v T
	if err := json.Unmarshal(res.StdoutBytes(), &v); err != nil {
		t.Fatalf("eval %s in %s printed %.200q: %v", code, id, res.Stdout, err)
	}
	return v
}

// TestRollbackAgainAndAgain: 25 times in a row, 200 with -long, with random writes to
// memory and disk between, everything is as it was, nothing is left, and only the
// kernel's random numbers are new.
func TestRollbackAgainAndAgain(t *testing.T) {
	w := running(t)
	times := 25
	if *long {
		times = 200
	}
	id := w.forkAs(t, forkd.ForkRequest{SnapshotTag: "py-base", Name: "worker"})[0].ID
	w.eval(t, id, rollbackSetup)
	point := decoded[forkd.BranchResult](t, w, "checkpoint", id, "--sync", "--label", "start")
	want := evalJSON[json.RawMessage](t, w, id, "state()")
	first := evalJSON[drawn](t, w, id, "draw()")
	kernel := map[string]bool{first.Kernel: true}
	took, calls := make([]float64, 0, times), make([]float64, 0, times)
	var before footprint
	for i := range times {
		w.eval(t, id, "spoil()")
		began := time.Now()
		res, err := w.client.Rollback(t.Context(), id, point.ID)
		if err != nil {
			t.Fatalf("rollback %d: %v", i, err)
		}
		calls = append(calls, res.DurationMS)
		got := evalJSON[json.RawMessage](t, w, id, "state()")
		took = append(took, float64(time.Since(began).Microseconds())/1000)
		if res.Sandbox.ID != id || string(got) != string(want) {
			t.Fatalf("after rollback %d the sandbox is\n%s\nwant\n%s", i, got, want)
		}
		d := evalJSON[drawn](t, w, id, "draw()")
		if !slices.Equal(d.Seeded, first.Seeded) {
			t.Errorf("rollback %d: the seeded generator drew %v, before %v", i, d.Seeded, first.Seeded)
		}
		if kernel[d.Kernel] || d.Generation <= first.Generation {
			t.Errorf("rollback %d: kernel random %s, generation %d after %d", i, d.Kernel, d.Generation, first.Generation)
		}
		kernel[d.Kernel] = true
		if i == 4 { // what is kept for later use is there by now
			before = w.footprint(t)
		}
	}
	slices.Sort(took)
	slices.Sort(calls)
	t.Logf("measured: %d rollbacks: median %.0f ms, slowest %.0f ms; until the sandbox had told all of its state: median %.0f ms, slowest %.0f ms",
		times, calls[times/2], calls[times-1], took[times/2], took[times-1])
	eventually(t, func() error { return w.footprint(t).within(before) })
	w.must(t, "kill", id)
	if _, err := w.client.Snapshot(t.Context(), point.ID); !errors.Is(err, forkd.ErrNotFound) {
		t.Errorf("the checkpoint outlived its sandbox: %v", err)
	}
}

// footprint is what a daemon and its machines have on the host.
type footprint struct {
	machines, descriptors, directories int
	diskMiB                            int64
}

func (w *world) footprint(t *testing.T) footprint {
	t.Helper()
	f := footprint{
		machines: len(machines(w.data)), directories: len(namesIn(filepath.Join(w.data, "sandboxes"))),
		descriptors: len(namesIn(fmt.Sprintf("/proc/%d/fd", w.daemon.Process.Pid))),
	}
	err := filepath.WalkDir(w.data, func(_ string, d os.DirEntry, err error) error {
		if err != nil {
			return nil // gone meanwhile
		}
		if info, err := d.Info(); err == nil {
			f.diskMiB += info.Sys().(*syscall.Stat_t).Blocks >> 11
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// within tells whether f is no more than before, up to what comes and goes.
func (f footprint) within(before footprint) error {
	if f.machines > before.machines || f.directories > before.directories || f.descriptors > before.descriptors+8 || f.diskMiB > before.diskMiB+64 {
		return fmt.Errorf("on the host are %+v, before %+v", f, before)
	}
	return nil
}

// TestLostSandboxComesBack: a sandbox whose machine was killed is lost, and a rollback
// revives it under its id and name.
func TestLostSandboxComesBack(t *testing.T) {
	w := running(t)
	sb := w.forkAs(t, forkd.ForkRequest{SnapshotTag: "py-base", Name: "phoenix"})[0]
	w.eval(t, sb.ID, "kept = 42; kept")
	w.must(t, "checkpoint", "phoenix", "--sync")
	w.eval(t, sb.ID, "kept = 0; kept")
	for range 2 {
		now, err := w.client.Sandbox(t.Context(), sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(*now.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			got, err := w.client.Sandbox(t.Context(), sb.ID)
			if err == nil && got.State != "lost" {
				err = fmt.Errorf("the sandbox is %s", got.State)
			}
			return err
		})
		if out := w.must(t, "ls", "-q"); !strings.Contains(out, sb.ID) {
			t.Errorf("ls does not show what is lost: %q", out)
		}
		if got := w.cli(t, "exec", "phoenix", "--", "true"); got.code != 125 || !strings.Contains(got.stderr, "ended") {
			t.Errorf("exec in a lost sandbox: %+v", got)
		}
		w.must(t, "rollback", "phoenix")
		if got := w.eval(t, sb.ID, "kept"); got != "42" {
			t.Errorf("it came back with %s", got)
		}
		w.answers(t, sb.ID)
		w.crash(t)
		w.restart(t)
		w.answers(t, sb.ID)
	}
}

// TestExecCheckpoint: a command that broke something is undone by the id that exec told.
func TestExecCheckpoint(t *testing.T) {
	w := running(t)
	id := w.fork(t, "py-base", 1)[0].ID
	w.exec(t, id, "echo good >/root/work; sync")
	got := w.cli(t, "exec", id, "--checkpoint", "--", "sh", "-c", "rm -rf /root/work /usr/bin; exit 3")
	if got.code != 3 || !strings.Contains(got.stderr, "forkd rollback "+id+" ck") {
		t.Fatalf("%+v", got)
	}
	point := got.stderr[strings.LastIndex(got.stderr, " ")+1:]
	w.must(t, "rollback", id, strings.TrimSpace(point))
	if out := w.exec(t, id, "cat /root/work; ls /usr/bin | wc -l"); !strings.HasPrefix(out, "good\n") || strings.HasSuffix(out, "\n0\n") {
		t.Errorf("after the rollback: %q", out)
	}
}

// TestAutomaticCheckpoints: they come by themselves, the newest stay, a rollback goes to
// any of them, and the schedule survives the daemon.
func TestAutomaticCheckpoints(t *testing.T) {
	w := running(t)
	id := w.fork(t, "py-base", 1)[0].ID
	w.must(t, "checkpoint", id, "--auto", "every=1s,keep=3")
	list := func() []forkd.Snapshot { return decoded[[]forkd.Snapshot](t, w, "checkpoints", id) }
	seen, step := map[string]bool{}, 0
	wait := func(n int) {
		t.Helper()
		eventually(t, func() error {
			step++
			w.eval(t, id, fmt.Sprintf("n = %d; n", step))
			for _, c := range list() {
				seen[c.ID] = true
			}
			if len(seen) < n {
				return fmt.Errorf("%d automatic checkpoints were seen", len(seen))
			}
			return nil
		})
	}
	wait(6)
	w.crash(t)
	w.restart(t)
	wait(8)
	w.must(t, "checkpoint", id, "--auto", "off")
	// The last one may still be under way, and the oldest goes when it is there.
	var all []forkd.Snapshot
	eventually(t, func() error {
		if all = list(); len(all) > 3 {
			return fmt.Errorf("%d checkpoints are there", len(all))
		}
		return nil
	})
	w.must(t, "rollback", id, all[0].ID)
	early := w.eval(t, id, "n")
	w.must(t, "rollback", id, all[len(all)-1].ID)
	if late := w.eval(t, id, "n"); early == late {
		t.Errorf("the oldest and the newest checkpoint both have n = %s", late)
	}
}

// TestEachChildHasItsHint: --each gives three children of a running sandbox three hints.
func TestEachChildHasItsHint(t *testing.T) {
	w := running(t)
	id := w.fork(t, "py-base", 1)[0].ID
	w.eval(t, id, "import os, json, random; count = 41; count += 1; count")
	each := filepath.Join(t.TempDir(), "each.jsonl")
	lines := ""
	for _, hint := range []string{"red", "green", "blue"} {
		lines += fmt.Sprintf(`{"env":{"HINT":%q},"labels":{"hint":%q},"files":{"/work/hint":%q}}`+"\n", hint, hint, hint)
	}
	if err := os.WriteFile(each, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("E2E_SECRET", "s3cret")
	children := decoded[[]forkd.Sandbox](t, w, "fork", id, "--each", each, "--reseed", "seed=5", "--secret", "E2E_SECRET")
	again := decoded[[]forkd.Sandbox](t, w, "fork", id, "--each", each, "--reseed", "seed=5")
	numbers := map[string]bool{}
	for i, sb := range children {
		hint := []string{"red", "green", "blue"}[i]
		const look = `(os.environ["HINT"], open("/work/hint").read(), os.environ["FORKD_INDEX"], json.load(open("/run/forkd/fork.json"))["labels"]["hint"], count)`
		if got, want := w.eval(t, sb.ID, look), fmt.Sprintf("('%s', '%s', '%d', '%s', 42)", hint, hint, i, hint); got != want || sb.Labels["hint"] != hint {
			t.Errorf("child %d has %s, want %s (labels %v)", i, got, want, sb.Labels)
		}
		if got := w.exec(t, sb.ID, "echo $HINT $FORKD_COUNT $E2E_SECRET"); got != hint+" 3 s3cret\n" {
			t.Errorf("a program in child %d sees %q", i, got)
		}
		const draw = `[random.random() for _ in range(3)]`
		mine := w.eval(t, sb.ID, draw)
		if numbers[mine] {
			t.Errorf("child %d draws what another drew", i)
		}
		numbers[mine] = true
		if other := w.eval(t, again[i].ID, draw); other != mine {
			t.Errorf("child %d with the same seed drew %s, then %s", i, mine, other)
		}
	}
	if got := w.cli(t, "fork", children[0].ID); got.code == 0 || !strings.Contains(got.stderr, "with-secrets") {
		t.Errorf("forking what holds secrets: %+v", got)
	}
}

// TestTreeAndDiff: what differs between a snapshot, a checkpoint and a running sandbox
// is told by file, and none of them changes.
func TestTreeAndDiff(t *testing.T) {
	w := running(t)
	sb := w.forkAs(t, forkd.ForkRequest{SnapshotTag: "py-base", Name: "worker"})[0]
	w.exec(t, sb.ID, "mkdir -p /srv/app; echo one >/srv/app/one; echo same >/srv/app/touched; echo abc >/srv/app/swap; rm /etc/motd; chmod 600 /etc/passwd")
	began := time.Now()
	got := w.must(t, "diff", "py-base", "worker")
	t.Logf("measured: diff of py-base and a sandbox in %.1f s", time.Since(began).Seconds())
	for _, line := range []string{"A /srv/app/", "A /srv/app/one", "D /etc/motd", "M /etc/passwd"} {
		if !strings.Contains(got, line+"\n") {
			t.Errorf("the diff does not say %q:\n%s", line, got)
		}
	}
	if n := strings.Count(got, "\n"); n > 20 {
		t.Errorf("the diff has %d lines:\n%s", n, got)
	}
	w.must(t, "checkpoint", "worker", "--sync", "--label", "mid")
	w.exec(t, sb.ID, "echo xyz >/srv/app/swap; touch /srv/app/touched; sleep 1000 >/dev/null 2>&1 &")
	point := decoded[[]forkd.Snapshot](t, w, "checkpoints", "worker")[0].ID
	d := decoded[forkd.Diff](t, w, "diff", point, "worker", "--patch")
	if len(d.Changes) != 1 || d.Changes[0].Path != "/srv/app/swap" || !strings.Contains(d.Patch, "-abc\n+xyz\n") {
		t.Errorf("changes since the checkpoint: %+v\n%s", d.Changes, d.Patch)
	}
	if len(d.ProcessesAdded) == 0 || !strings.Contains(d.ProcessesAdded[len(d.ProcessesAdded)-1].Command, "sleep 1000") || d.A.MemoryTotalKiB == 0 {
		t.Errorf("processes and memory: %+v", d)
	}
	if same := w.must(t, "diff", point, point); same != "" {
		t.Errorf("a checkpoint differs from itself:\n%s", same)
	}
	tree := decoded[[]forkd.TreeNode](t, w, "tree", "worker")
	if n := len(tree); n != 3 || tree[0].Name != "py-base" || tree[1].Name != "mid" || tree[2].ID != sb.ID || tree[2].Depth != 2 {
		t.Errorf("the tree is %+v", tree)
	}
	w.answers(t, sb.ID)
}
