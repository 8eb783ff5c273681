package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/api/rest"
	forkd "forkd.dev/forkd/sdk/go"
)

// TestTwoClientsForkAtOnce: both get all they asked for, and nothing twice.
func TestTwoClientsForkAtOnce(t *testing.T) {
	w := running(t)
	const n = 25
	var answers [2]outcome
	var g errgroup.Group
	for i := range answers {
		g.Go(func() error {
			answers[i] = w.cli(t, "fork", "--tag", "py-base", "-n", fmt.Sprint(n))
			return nil
		})
	}
	_ = g.Wait() // there is nothing to fail
	seen := map[string]bool{}
	for _, a := range answers {
		if a.code != 0 {
			t.Errorf("fork: %+v", a)
		}
		for _, id := range strings.Fields(a.stdout) {
			seen[id] = true
		}
	}
	if len(seen) != 2*n {
		t.Errorf("%d different sandboxes, want %d", len(seen), 2*n)
	}
}

// TestVanishedClient: who closes the connection in the middle of a fork leaves no
// child behind.
func TestVanishedClient(t *testing.T) {
	w := running(t)
	stay := w.fork(t, "py-base", 1)[0]
	lines, drop := w.streamFork(t, `{"snapshot_tag":"py-base","n":50,"labels":{"whose":"nobody"}}`)
	var line rest.ForkLine
	if !lines.Scan() {
		t.Fatalf("no line of the fork: %v", lines.Err())
	}
	if err := json.Unmarshal(lines.Bytes(), &line); err != nil || line.Sandbox == nil {
		t.Fatalf("first line %s: %v", lines.Bytes(), err)
	}
	drop()
	eventually(t, func() error {
		list, err := w.client.Sandboxes(t.Context())
		for _, sb := range list {
			if sb.EndedAtUnix == nil && sb.Labels["whose"] == "nobody" {
				return fmt.Errorf("%s is %s", sb.ID, sb.State)
			}
		}
		return err
	})
	w.checkConsistent(t, stay.ID)
}

// TestCancelledCalls: who gives up waiting ends the program or the code.
func TestCancelledCalls(t *testing.T) {
	w := running(t)
	sb := w.fork(t, "py-base", 1)[0].ID
	for name, call := range map[string]func(context.Context) error{
		"exec": func(ctx context.Context) error {
			_, err := w.client.Exec(ctx, sb, forkd.ExecRequest{Args: []string{"sh", "-c", "touch /root/began; exec sleep 1234"}, TimeoutSecs: forkd.Seconds(600)})
			return err
		},
		"eval": func(ctx context.Context) error {
			_, err := w.client.Eval(ctx, sb, forkd.EvalRequest{Code: "open('/root/began', 'w').close()\nwhile True: pass", TimeoutSecs: forkd.Seconds(600)})
			return err
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- call(ctx) }()
		eventually(t, func() error {
			res, err := w.client.Exec(t.Context(), sb, forkd.ExecRequest{Args: []string{"rm", "/root/began"}})
			if err == nil && res.ExitCode != 0 {
				err = fmt.Errorf("%s has not begun", name)
			}
			return err
		})
		cancel()
		if err := <-ended; !errors.Is(err, forkd.ErrCanceled) {
			t.Errorf("%s: %v", name, err)
		}
		eventually(t, func() error {
			res, err := w.client.Exec(t.Context(), sb, forkd.ExecRequest{Args: []string{"sh", "-c", "grep -lx sleep /proc/[0-9]*/comm"}})
			if err == nil && res.ExitCode == 0 {
				err = fmt.Errorf("%s: the program still runs", name)
			}
			return err
		})
		w.answers(t, sb)
	}
}

// TestManyEvalsAtOnce: 100 evals over 10 sandboxes, each answered to its asker.
func TestManyEvalsAtOnce(t *testing.T) {
	w := running(t)
	list := w.fork(t, "py-base", 10)
	var g errgroup.Group
	for i := range 100 {
		g.Go(func() error {
			sb := list[i%len(list)]
			res, err := w.client.Eval(t.Context(), sb.ID, forkd.EvalRequest{
				Code: fmt.Sprintf("print(%d)\nimport socket; (socket.gethostname(), %d * %d)", i, i, i), TimeoutSecs: forkd.Seconds(120),
			})
			want := fmt.Sprintf("('%s', %d)", sb.ID, i*i)
			if err != nil || text(res.Result) != want || res.Stdout != fmt.Sprintf("%d\n", i) {
				return fmt.Errorf("eval %d: %s, printed %q, error %s, %w; want %s", i, text(res.Result), res.Stdout, text(res.Error), err, want)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// TestConsoleFlood: a guest that writes to its console without end fills nothing
// on the host and disturbs nobody.
func TestConsoleFlood(t *testing.T) {
	w := running(t)
	list := w.fork(t, "py-base", 2)
	before := w.diskUsage(t, list[0].ID)
	res, err := w.client.Exec(t.Context(), list[0].ID, forkd.ExecRequest{
		Args: []string{"sh", "-c", "timeout 3 cat /dev/zero > /dev/ttyS0; echo $?"}, TimeoutSecs: forkd.Seconds(60),
	})
	if err != nil || strings.TrimSpace(res.Stdout) != "124" {
		t.Errorf("flood: %+v, %v", res, err)
	}
	w.answers(t, list[0].ID)
	w.answers(t, list[1].ID)
	if grown := w.diskUsage(t, list[0].ID) - before; grown > 8<<20 {
		t.Errorf("the sandbox's files grew by %d bytes", grown)
	}
}

// diskUsage sums what the files of a sandbox take on the host.
func (w *world) diskUsage(t *testing.T, id string) int64 {
	t.Helper()
	return diskUsageOf(t, filepath.Join(w.data, "sandboxes", id))
}

// diskUsageOf sums what the files below a path take.
func diskUsageOf(t *testing.T, path string) int64 {
	t.Helper()
	sum := int64(0)
	err := filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil {
			sum += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}
