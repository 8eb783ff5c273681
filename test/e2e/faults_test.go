package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/api/rest"
	forkd "forkd.dev/forkd/sdk/go"
)

// operation is a call that a fault meets half-way; how it ends does not matter.
type operation func(ctx context.Context, w *world)

// begin starts operations. The function it returns breaks off what still goes on,
// and waits for it; the channel is closed when all have ended by themselves.
func (w *world) begin(t *testing.T, ops ...operation) (ended <-chan struct{}, cut func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), callPatience)
	var g sync.WaitGroup
	for _, op := range ops {
		g.Go(func() { op(ctx, w) })
	}
	done := make(chan struct{})
	go func() {
		g.Wait()
		close(done)
	}()
	return done, func() {
		cancel()
		<-done
	}
}

// reach waits for a moment of operations under way. It tells whether the moment
// came before they ended.
func reach(t *testing.T, ended <-chan struct{}, moment func() bool) bool {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.NewTimer(callPatience)
	defer late.Stop()
	for !moment() {
		select {
		case <-tick.C:
		case <-ended:
			return moment()
		case <-late.C:
			t.Fatal("the moment of the fault never came")
		}
	}
	return true
}

// post is an operation by a plain request whose answer is read and dropped.
func post(path, body string) operation {
	return func(ctx context.Context, w *world) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url()+path, strings.NewReader(body))
		if err != nil {
			panic(err)
		}
		req.Header.Set("Content-Type", rest.JSON)
		if res, err := http.DefaultClient.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
		}
	}
}

// staged is the moment when a snapshot under way has a file of that name.
func (w *world) staged(name string) func() bool {
	return func() bool {
		found, _ := filepath.Glob(filepath.Join(w.data, "snapshots", ".staging-*", name))
		return len(found) > 0
	}
}

// more is the moment when a folder has a name that it does not have now.
func (w *world) more(dir string) func() bool {
	dir = filepath.Join(w.data, dir)
	before := namesIn(dir)
	return func() bool {
		return slices.ContainsFunc(namesIn(dir), func(name string) bool {
			return !slices.Contains(before, name) && !strings.HasPrefix(name, ".staging")
		})
	}
}

// TestDaemonKilledInEachOperation kills the daemon at chosen moments of what it
// does. The next one adopts what runs, lists nothing half-made and keeps nothing
// of it.
func TestDaemonKilledInEachOperation(t *testing.T) {
	w := running(t)
	w.removeSnapshots(t)
	t.Cleanup(func() {
		w.restart(t)
		w.must(t, "pool", "set", "py-base", "--warm", "0")
		w.killAll(t)
		w.removeSnapshots(t)
		w.cli(t, "image", "rm", "half-4") // if it was complete
	})
	list := w.fork(t, "py-base", 2)
	for _, sb := range list {
		w.eval(t, sb.ID, fmt.Sprintf("mine = %q; blob = bytes(20 << 20); 1", sb.ID))
		w.exec(t, sb.ID, "echo "+sb.ID+" > /root/mine; sync")
	}
	a, b := "/v1/sandboxes/"+list[0].ID, "/v1/sandboxes/"+list[1].ID
	if _, err := w.client.Checkpoint(t.Context(), list[1].ID, forkd.CheckpointRequest{Sync: true}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		ops    []operation
		moment func() func() bool
	}{
		{
			"branch, devices being saved", []operation{post(a+"/branch", `{"tag":"half-1"}`)},
			func() func() bool { return w.staged("device.state") },
		},
		{
			"branch without waiting, memory being written; pool being filled",
			[]operation{post(a+"/branch", `{"tag":"half-2","wait":false}`), func(ctx context.Context, w *world) {
				_, _ = w.client.SetPool(ctx, "py-base", 3)
			}},
			func() func() bool { return w.staged("memory.layer") },
		},
		{
			"checkpoint, published and not proved; warm pool being filled", []operation{post(a+"/checkpoints", `{"sync":true}`)},
			func() func() bool { return w.more("snapshots") },
		},
		{
			"rollback and fork of a sandbox, machines being made",
			[]operation{post(b+"/rollback", `{}`), post("/v1/sandboxes", `{"snapshot_tag":"`+list[0].ID+`","n":3}`)},
			func() func() bool { return w.more("sandboxes") },
		},
		{
			"fork of 50 and rollback", []operation{post(b+"/rollback", `{}`), post("/v1/sandboxes", `{"snapshot_tag":"py-base","n":50}`)},
			func() func() bool { return func() bool { return len(machines(w.data)) > 25 } },
		},
		{
			"image being built", []operation{post("/v1/images", `{"name":"half-4","packages":["hello"]}`)},
			func() func() bool {
				return func() bool {
					found, _ := filepath.Glob(filepath.Join(w.data, "images", ".tmp-*", "*"))
					return len(found) > 0
				}
			},
		},
		{
			"snapshot of an image", []operation{post("/v1/snapshots", `{"tag":"half-3","image":"python"}`)},
			func() func() bool { return w.staged("device.state") },
		},
	} {
		moment := c.moment()
		ended, cut := w.begin(t, c.ops...)
		if !reach(t, ended, moment) {
			t.Logf("%s: it was over before the daemon was killed", c.name)
		}
		w.crash(t)
		cut()
		began := time.Now()
		w.restart(t)
		w.checkAfterFault(t, c.name, list)
		t.Logf("%s: checked after %v", c.name, time.Since(began))
	}
	w.must(t, "pool", "set", "py-base", "--warm", "0")
	for _, sb := range list { // what they were captured to half-way does not matter to the next capture
		child := w.forkAs(t, forkd.ForkRequest{SnapshotTag: sb.ID})[0]
		if got := w.eval(t, child.ID, "mine") + w.exec(t, child.ID, "cat /root/mine"); got != "'"+sb.ID+"'"+sb.ID+"\n" {
			t.Errorf("a fork of %s holds %q", sb.ID, got)
		}
	}
	w.checkConsistent(t, list[0].ID)
}

// checkAfterFault: the sandboxes of list hold what they held, every ready snapshot
// forks and answers, each other one says why not, and no files are left of any.
func (w *world) checkAfterFault(t *testing.T, name string, list []forkd.Sandbox) {
	t.Helper()
	for _, sb := range list {
		if got := w.eval(t, sb.ID, "mine"); got != "'"+sb.ID+"'" {
			t.Errorf("%s: %s holds %s", name, sb.ID, got)
		}
		if got := w.exec(t, sb.ID, "cat /root/mine"); got != sb.ID+"\n" {
			t.Errorf("%s: %s reads %q", name, sb.ID, got)
		}
	}
	mine := map[string]bool{}
	for _, sb := range list {
		mine[sb.ID] = true
	}
	living, err := w.client.Sandboxes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range living { // children that were complete
		if sb.EndedAtUnix == nil && !mine[sb.ID] {
			if got := w.eval(t, sb.ID, "6*7"); got != "42" {
				t.Errorf("%s: %s answers %s", name, sb.ID, got)
			}
			if err := w.client.Kill(t.Context(), sb.ID); err != nil {
				t.Error(err)
			}
		}
	}
	w.checkSnapshots(t, name)
}

// checkSnapshots forks every ready snapshot, and compares the list with the disk.
func (w *world) checkSnapshots(t *testing.T, name string) {
	t.Helper()
	all, err := w.client.Snapshots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, sn := range all {
		switch sn.Status {
		case "ready":
			listed[sn.ID] = true
			child := w.forkAs(t, forkd.ForkRequest{SnapshotTag: sn.ID})[0]
			if got := w.eval(t, child.ID, "6*7"); got != "42" {
				t.Errorf("%s: a fork of %s answers %s", name, sn.ID, got)
			}
			if err := w.client.Kill(t.Context(), child.ID); err != nil {
				t.Error(err)
			}
		case "failed":
			if sn.Warning == "" {
				t.Errorf("%s: snapshot %s failed for no reason", name, sn.ID)
			}
		default:
			t.Errorf("%s: snapshot %s is %s", name, sn.ID, sn.Status)
		}
	}
	for _, found := range namesIn(filepath.Join(w.data, "snapshots")) {
		if !listed[found] {
			t.Errorf("%s: snapshots/%s is left", name, found)
		}
	}
	for _, found := range namesIn(filepath.Join(w.data, "images")) {
		if strings.HasPrefix(found, ".") {
			t.Errorf("%s: images/%s is left", name, found)
		}
	}
}

// removeSnapshots deletes what tests made, newest first.
func (w *world) removeSnapshots(t *testing.T) {
	t.Helper()
	all, err := w.client.Snapshots(context.WithoutCancel(t.Context()))
	if err != nil {
		t.Error(err)
	}
	for _, sn := range all {
		if slices.Contains(sn.Tags, "py-base") {
			continue
		}
		if got := w.cli(t, "snapshot", "rm", "--cascade", sn.ID); got.code != 0 && got.code != 3 {
			t.Errorf("remove snapshot %s: %+v", sn.ID, got)
		}
	}
}

// TestMachineKilledInEachState kills a machine's process while it is made,
// captured and rolled back.
func TestMachineKilledInEachState(t *testing.T) {
	w := running(t)
	t.Cleanup(func() {
		w.killAll(t)
		w.removeSnapshots(t)
	})
	list := w.fork(t, "py-base", 3)
	stay, source, back := list[0], list[1], list[2]
	for _, sb := range list {
		w.eval(t, sb.ID, "blob = bytes(50 << 20); mine = 1; mine")
	}
	if _, err := w.client.Checkpoint(t.Context(), back.ID, forkd.CheckpointRequest{Sync: true}); err != nil {
		t.Fatal(err)
	}
	w.killInAFork(t)
	w.killInACapture(t, source)
	w.killInARollback(t, back)
	w.checkSnapshots(t, "after all")
	w.checkConsistent(t, stay.ID)
}

// killInAFork kills new machines of a fork under way: it answers in full, or says
// what happened and leaves nothing.
func (w *world) killInAFork(t *testing.T) {
	t.Helper()
	before := machines(w.data)
	failed := make(chan error, 1)
	ended, cut := w.begin(t, func(ctx context.Context, w *world) {
		_, err := w.client.Fork(ctx, forkd.ForkRequest{SnapshotTag: "py-base", N: forkd.Int(20), Labels: map[string]string{"doomed": "yes"}}, nil)
		failed <- err
	})
	defer cut()
	killed := 0
	reach(t, ended, func() bool {
		for id, p := range machines(w.data) {
			if _, ok := before[id]; !ok && killed < 2 {
				killed++
				before[id] = p
				_ = syscall.Kill(p.pid, syscall.SIGKILL) // it may be over
			}
		}
		return killed == 2
	})
	if err := <-failed; err != nil && !errors.Is(err, forkd.ErrGuest) && !errors.Is(err, forkd.ErrUnavailable) {
		t.Errorf("fork with a machine that was killed: %v", err)
	} else if err == nil {
		return // they were of the pool
	}
	eventually(t, func() error {
		all, err := w.client.Sandboxes(t.Context())
		for _, sb := range all {
			if sb.EndedAtUnix == nil && sb.Labels["doomed"] != "" {
				return fmt.Errorf("%s of the failed fork is %s", sb.ID, sb.State)
			}
		}
		return err
	})
}

// killInACapture kills the source of a branch while its state is taken.
func (w *world) killInACapture(t *testing.T, source forkd.Sandbox) {
	t.Helper()
	failed := make(chan error, 1)
	ended, cut := w.begin(t, func(ctx context.Context, w *world) {
		_, err := w.client.Branch(ctx, source.ID, forkd.BranchRequest{Tag: "doomed"})
		failed <- err
	})
	defer cut()
	reach(t, ended, w.staged("device.state"))
	if err := syscall.Kill(*source.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; err != nil && !strings.Contains(err.Error(), source.ID) {
		t.Errorf("branch of a machine that was killed: %v", err)
	}
	w.checkEnded(t, source.ID, "failed")
}

// killInARollback kills the machine that a rollback would replace: the sandbox is
// back or lost, and a lost one comes back by another rollback.
func (w *world) killInARollback(t *testing.T, back forkd.Sandbox) {
	t.Helper()
	w.eval(t, back.ID, "mine = 2; mine")
	moment := w.more("sandboxes")
	ended, cut := w.begin(t, post("/v1/sandboxes/"+back.ID+"/rollback", `{}`))
	defer cut()
	reach(t, ended, moment)
	_ = syscall.Kill(*back.PID, syscall.SIGKILL) // it may be over
	<-ended
	if _, err := w.client.Rollback(t.Context(), back.ID, ""); err != nil {
		t.Errorf("rollback after the machine was killed: %v", err)
	}
	if got := w.eval(t, back.ID, "mine"); got != "1" {
		t.Errorf("after the rollback it holds %s", got)
	}
}

// checkEnded waits until a sandbox has ended in a state and says why.
func (w *world) checkEnded(t *testing.T, id, state string) {
	t.Helper()
	eventually(t, func() error {
		sb, err := w.client.Sandbox(t.Context(), id)
		if err == nil && (sb.State != state || sb.Reason == "") {
			err = fmt.Errorf("%s is %s, reason %q", id, sb.State, sb.Reason)
		}
		return err
	})
}

// TestEverythingKilled: after an end of the daemon and all machines at once nothing
// of them is left, and a sandbox with a checkpoint comes back.
func TestEverythingKilled(t *testing.T) {
	w := running(t)
	t.Cleanup(func() {
		w.killAll(t)
		w.removeSnapshots(t)
	})
	list := w.fork(t, "py-base", 3)
	w.eval(t, list[0].ID, "mine = 1; mine")
	if _, err := w.client.Checkpoint(t.Context(), list[0].ID, forkd.CheckpointRequest{Sync: true}); err != nil {
		t.Fatal(err)
	}
	_, cut := w.begin(t, post("/v1/sandboxes", `{"snapshot_tag":"py-base","n":20}`))
	w.crash(t)
	cut()
	for _, p := range machines(w.data) {
		_ = syscall.Kill(p.pid, syscall.SIGKILL) // it may be ending
	}
	w.restart(t)
	w.checkEnded(t, list[0].ID, "lost")
	w.checkEnded(t, list[1].ID, "failed")
	if _, err := w.client.Rollback(t.Context(), list[0].ID, ""); err != nil {
		t.Fatalf("revive: %v", err)
	}
	if got := w.eval(t, list[0].ID, "mine"); got != "1" {
		t.Errorf("it came back with %s", got)
	}
	w.checkSnapshots(t, "all killed")
	w.checkConsistent(t, list[0].ID)
}

// TestForkOfASnapshotBeingDeleted: a fork and a deletion of one snapshot exclude
// each other; whoever comes second is told.
func TestForkOfASnapshotBeingDeleted(t *testing.T) {
	w := running(t)
	stay := w.fork(t, "py-base", 1)[0]
	for i := range 3 {
		tag := fmt.Sprint("going-", i)
		if _, err := w.client.Branch(t.Context(), stay.ID, forkd.BranchRequest{Tag: tag}); err != nil {
			t.Fatal(err)
		}
		var forked, deleted error
		var res forkd.ForkResult
		gate := make(chan struct{})
		_, cut := w.begin(t, func(ctx context.Context, w *world) {
			defer close(gate)
			res, forked = w.client.Fork(ctx, forkd.ForkRequest{SnapshotTag: tag, N: forkd.Int(5)}, nil)
		}, func(ctx context.Context, w *world) {
			tick := time.NewTicker(time.Duration(1+20*i) * time.Millisecond)
			defer tick.Stop()
			<-tick.C
			deleted = w.client.DeleteSnapshot(ctx, tag, "")
		})
		<-gate
		cut()
		switch {
		case forked == nil && errors.Is(deleted, forkd.ErrConflict):
			for _, sb := range res.Sandboxes {
				w.answers(t, sb.ID)
				if err := w.client.Kill(t.Context(), sb.ID); err != nil {
					t.Error(err)
				}
			}
			if err := w.client.DeleteSnapshot(t.Context(), tag, ""); err != nil {
				t.Errorf("delete it when its forks are gone: %v", err)
			}
		case deleted == nil && errors.Is(forked, forkd.ErrNotFound):
		default:
			t.Errorf("fork: %v; delete: %v", forked, deleted)
		}
	}
	w.checkSnapshots(t, "deleted")
	w.checkConsistent(t, stay.ID)
}

// TestDaemonOutOfMemory: the kernel kills a daemon that finds no memory for what a
// capture copies; the next one has what there was.
func TestDaemonOutOfMemory(t *testing.T) {
	w := running(t)
	sb := w.fork(t, "py-base", 1)[0]
	w.eval(t, sb.ID, "import os; mine = 1; blob = os.urandom(150 << 20); mine")
	w.limitDaemon(t, 100<<20)
	t.Cleanup(func() {
		w.restart(t)
		w.killAll(t)
		w.removeSnapshots(t)
	})
	if _, err := w.client.Branch(t.Context(), sb.ID, forkd.BranchRequest{Tag: "large"}); err == nil {
		t.Error("a daemon with 100 MiB copied 150 MiB")
	}
	if w.up() { // it noticed by itself
		w.crash(t)
	}
	w.restart(t)
	if got := w.eval(t, sb.ID, "mine"); got != "1" {
		t.Errorf("the sandbox holds %s", got)
	}
	w.checkSnapshots(t, "out of memory")
	if _, err := w.client.Branch(t.Context(), sb.ID, forkd.BranchRequest{Tag: "large", Replace: true}); err != nil {
		t.Errorf("branch with memory enough: %v", err)
	}
	w.checkConsistent(t, sb.ID)
}

// limitDaemon puts the daemon alone into a control group with a limit on memory.
func (w *world) limitDaemon(t *testing.T, bytes int64) {
	t.Helper()
	const dir = "/sys/fs/cgroup/memory"
	group := filepath.Join(dir, filepath.Base(w.dir))
	if _, err := os.Stat(filepath.Join(dir, "memory.limit_in_bytes")); err != nil {
		t.Skipf("needs control groups of version 1, which limit a process wherever its children are: %v", err)
	}
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := waitUntil(endPatience, func() error { return os.Remove(group) }); err != nil {
			t.Error(err)
		}
	})
	for name, value := range map[string]int64{"memory.limit_in_bytes": bytes, "cgroup.procs": int64(w.daemon.Process.Pid)} {
		if err := os.WriteFile(filepath.Join(group, name), []byte(fmt.Sprint(value)), 0); err != nil {
			t.Fatal(err)
		}
	}
}
