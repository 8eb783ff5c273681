package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"forkd.dev/forkd/api/rest"
	forkd "forkd.dev/forkd/sdk/go"
)

// TestDaemonKilledWithRunningSandboxes: the next daemon takes over what runs.
func TestDaemonKilledWithRunningSandboxes(t *testing.T) {
	w := running(t)
	list := w.fork(t, "py-base", 10)
	for i, sb := range list {
		w.eval(t, sb.ID, fmt.Sprintf("mine = %d; mine", i))
	}
	w.exec(t, list[0].ID, "echo said before >/dev/console")
	eventually(t, func() error {
		if out := w.must(t, "logs", list[0].ID); !strings.Contains(out, "said before") {
			return fmt.Errorf("the console says %q", out)
		}
		return nil
	})
	w.crash(t)
	w.restart(t)
	if out := w.must(t, "logs", list[0].ID); !strings.Contains(out, "said before") {
		t.Errorf("after the restart the console says %q", out)
	}
	w.checkAdopted(t, list)
	w.stop(t)
	if got := w.cli(t, "ls"); got.code != 5 || !strings.Contains(got.stderr, "forkd serve") {
		t.Errorf("ls without a daemon: %+v", got)
	}
	w.restart(t)
	w.checkAdopted(t, list)
	w.must(t, "kill", "--all")
	left := machines(w.data)
	for _, sb := range list {
		if p, ok := left[sb.ID]; ok {
			t.Errorf("%s was killed, but there is %v", sb.ID, p)
		}
	}
}

// checkAdopted: all of list are the same machines as before, and answer.
func (w *world) checkAdopted(t *testing.T, list []forkd.Sandbox) {
	t.Helper()
	if got := len(strings.Fields(w.must(t, "ls", "-q"))); got != len(list) {
		t.Errorf("%d sandboxes are listed, want %d", got, len(list))
	}
	each(t, list, func(i int, before forkd.Sandbox) error {
		sb, err := w.client.Sandbox(t.Context(), before.ID)
		if err != nil {
			return err
		}
		if sb.State != "running" || *sb.PID != *before.PID || sb.SnapshotTag != before.SnapshotTag || sb.CreatedAtUnix != before.CreatedAtUnix {
			return fmt.Errorf("%s was %+v, is %+v", sb.ID, before, sb)
		}
		res, err := w.client.Eval(t.Context(), sb.ID, forkd.EvalRequest{Code: "mine"})
		if err != nil || text(res.Result) != fmt.Sprint(i) {
			return fmt.Errorf("%s: eval after the restart: %s, %s, %w", sb.ID, text(res.Result), text(res.Error), err)
		}
		out, err := w.client.Exec(t.Context(), sb.ID, forkd.ExecRequest{Args: []string{"hostname"}})
		if err != nil || out.Stdout != sb.ID+"\n" {
			return fmt.Errorf("%s: exec after the restart: %q, %w", sb.ID, out.Stdout, err)
		}
		return nil
	})
}

// TestDaemonKilledInAFork: of a fork that was under way, the next daemon keeps
// the children that were complete and removes the rest.
func TestDaemonKilledInAFork(t *testing.T) {
	w := running(t)
	stay := w.fork(t, "py-base", 1)[0]
	for _, ready := range []int{1, 4, 10} {
		lines, drop := w.streamFork(t, `{"snapshot_tag":"py-base","n":20}`)
		for range ready {
			if !lines.Scan() {
				t.Fatalf("the fork ended early: %v", lines.Err())
			}
		}
		w.crash(t)
		drop()
		w.restart(t)
		w.checkConsistent(t, stay.ID)
	}
}

// TestDaemonKilledInASnapshot: a snapshot that was being made is not there, and
// neither is the machine it was made in.
func TestDaemonKilledInASnapshot(t *testing.T) {
	w := running(t)
	stay := w.fork(t, "py-base", 1)[0]
	for _, from := range []string{`"from":"py-base"`, `"image":"python"`} {
		ctx, cancel := context.WithTimeout(t.Context(), callPatience)
		res := w.request(ctx, t, "POST", "/v1/snapshots", `{"tag":"half",`+from+`,"exec":["echo x > /root/x; sync; sleep 1000"]}`, rest.NDJSON)
		lines := bufio.NewScanner(res.Body)
		for lines.Scan() && !strings.Contains(lines.Text(), "running command") {
			continue // the steps before
		}
		w.crash(t)
		cancel()
		_ = res.Body.Close()
		w.restart(t)
		if got := w.cli(t, "snapshot", "info", "half"); got.code != 3 {
			t.Errorf("%s: the snapshot is there: %+v", from, got)
		}
		w.checkConsistent(t, stay.ID)
	}
	for _, name := range namesIn(filepath.Join(w.data, "snapshots")) {
		if _, err := w.client.Snapshot(t.Context(), name); err != nil {
			t.Errorf("snapshots/%s is no snapshot: %v", name, err)
		}
	}
}

// streamFork begins a fork that answers line by line.
func (w *world) streamFork(t *testing.T, body string) (*bufio.Scanner, func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), callPatience)
	res := w.request(ctx, t, "POST", "/v1/sandboxes", body, rest.NDJSON)
	if res.StatusCode != 200 {
		raw, _ := io.ReadAll(res.Body)
		t.Fatalf("fork: %s: %s", res.Status, raw)
	}
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	return lines, func() {
		cancel()
		_ = res.Body.Close()
	}
}

// checkConsistent: what is listed answers, every process and every directory
// belongs to what is listed or to the pool, and id is among them.
func (w *world) checkConsistent(t *testing.T, id string) {
	t.Helper()
	living := map[string]bool{}
	pids := map[int]bool{}
	list, err := w.client.Sandboxes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range list {
		if sb.EndedAtUnix == nil {
			living[sb.ID], pids[*sb.PID] = true, true
			w.answers(t, sb.ID)
		}
	}
	if !living[id] {
		t.Errorf("sandbox %s is not listed: %v", id, living)
	}
	// What is neither listed nor of the pool would stay after the pool has gone.
	// After a rollback the machine has an id of its own.
	w.stop(t)
	used := map[string]bool{}
	for id, p := range machines(w.data) {
		if used[id] = pids[p.pid]; !used[id] {
			t.Errorf("machine %s, process %d, belongs to no sandbox", id, p.pid)
		}
	}
	for _, name := range namesIn(filepath.Join(w.data, "sandboxes")) {
		if !used[name] {
			t.Errorf("directory %s belongs to no sandbox", name)
		}
	}
	w.restart(t)
}

// TestMachineKilled: one sandbox whose process dies is failed with a reason; it
// can be removed, and the others notice nothing.
func TestMachineKilled(t *testing.T) {
	w := running(t)
	list := w.fork(t, "py-base", 3)
	victim := list[1]
	if err := syscall.Kill(*victim.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		sb, err := w.client.Sandbox(t.Context(), victim.ID)
		if err == nil && (sb.State != "failed" || sb.Reason == "") {
			err = fmt.Errorf("state %s, reason %q", sb.State, sb.Reason)
		}
		return err
	})
	if got := w.cli(t, "eval", victim.ID, "1"); got.code != 1 || !strings.Contains(got.stderr, victim.ID) {
		t.Errorf("eval in it: %+v", got)
	}
	if got := w.cli(t, "exec", victim.ID, "--", "true"); got.code != 125 {
		t.Errorf("exec in it: %+v", got)
	}
	w.answers(t, list[0].ID)
	w.answers(t, list[2].ID)
	if err := w.client.Kill(t.Context(), victim.ID); err != nil {
		t.Errorf("remove it: %v", err)
	}
	if got := w.must(t, "ls", "-q"); strings.Contains(got, victim.ID) {
		t.Errorf("still listed: %s", got)
	}
	w.checkConsistent(t, list[0].ID)
}

// TestGuestEndsItself: a machine that is shut down or crashed from inside.
func TestGuestEndsItself(t *testing.T) {
	w := running(t)
	list := w.fork(t, "py-base", 2)
	// The answer depends on what goes first, the machine or the program's end.
	_, _ = w.client.Exec(t.Context(), list[0].ID, forkd.ExecRequest{Args: []string{"sh", "-c", "echo c > /proc/sysrq-trigger; kill -9 1; reboot -f"}, TimeoutSecs: forkd.Seconds(5)})
	eventually(t, func() error {
		sb, err := w.client.Sandbox(t.Context(), list[0].ID)
		if err == nil && (sb.State != "failed" || sb.Reason == "") {
			err = fmt.Errorf("state %s, reason %q", sb.State, sb.Reason)
		}
		return err
	})
	w.answers(t, list[1].ID)
}
