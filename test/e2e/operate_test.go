package e2e

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	forkd "forkd.dev/forkd/sdk/go"
)

// smallLimitMiB is what a fork of py-base has to work well with.
const smallLimitMiB = 256

// TestMemoryLimit: a fork with 256 MiB works; one whose guest takes more than its
// limit ends with the reason oom, and its siblings do not notice.
func TestMemoryLimit(t *testing.T) {
	w := running(t)
	list := w.forkAs(t, forkd.ForkRequest{SnapshotTag: "py-base", N: forkd.Int(2), MemoryLimitMiB: forkd.Int(smallLimitMiB)})
	victim, sibling := list[0].ID, list[1].ID
	if got := w.eval(t, victim, "int(numpy.arange(10).sum())"); got != "45" {
		t.Errorf("numpy answers %s", got)
	}
	w.answers(t, victim)
	_, err := w.client.Eval(t.Context(), victim, forkd.EvalRequest{Code: "len(bytearray(400 << 20))"})
	if !errors.Is(err, forkd.ErrGuest) || !strings.Contains(err.Error(), "oom") {
		t.Errorf("the call that broke the limit ended with %v", err)
	}
	err = w.await(endPatience, func(ctx context.Context) error {
		sb, err := w.client.Sandbox(ctx, victim)
		if err == nil && (sb.State != "failed" || !strings.HasPrefix(sb.Reason, "oom")) {
			err = errors.New("it is " + sb.State + ": " + sb.Reason)
		}
		return err
	})
	if err != nil {
		t.Errorf("the sandbox over its limit: %v", err)
	}
	w.answers(t, sibling)
	got := w.cli(t, "fork", "py-base", "--memory-limit", "32")
	if got.code != 2 || !strings.Contains(got.stderr, "needs for itself") {
		t.Errorf("a limit that no machine can live with: %+v", got)
	}
}

// TestCPULimit: the same work takes several times longer with a fifth of a processor.
func TestCPULimit(t *testing.T) {
	w := running(t)
	const limit = 0.2
	processors := limit
	slow := w.forkAs(t, forkd.ForkRequest{SnapshotTag: "py-base", CPULimit: &processors})[0]
	if slow.CPULimit == nil || *slow.CPULimit != limit {
		t.Errorf("the sandbox does not show its limit: %+v", slow.CPULimit)
	}
	w.answers(t, slow.ID)
	before, err := w.client.SandboxStats(t.Context(), slow.ID)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	w.eval(t, slow.ID, "sum(range(2000000))")
	took := time.Since(began)
	after, err := w.client.SandboxStats(t.Context(), slow.ID)
	if err != nil {
		t.Fatal(err)
	}
	used := time.Duration((after.Usage.CPUMS - before.Usage.CPUMS) * float64(time.Millisecond))
	// Two periods of slack: one may be full at either end.
	if allowed := time.Duration(float64(took)*limit) + 200*time.Millisecond; used > allowed {
		t.Errorf("it used %v of processor time in %v, %v are allowed", used, took, allowed)
	}
}

// TestWarmPoolOfRealMachines: warm machines become sandboxes like all others, and
// the pool outlives the daemon.
func TestWarmPoolOfRealMachines(t *testing.T) {
	w := running(t)
	w.must(t, "pool", "set", "py-base", "--warm", "3")
	t.Cleanup(func() { w.must(t, "pool", "set", "py-base", "--warm", "0") })
	full := func() {
		t.Helper()
		err := w.await(time.Minute, func(ctx context.Context) error {
			pools, err := w.client.Pools(ctx)
			if err == nil && (len(pools) != 1 || pools[0].Ready != 3) {
				err = errors.New("it is not full")
			}
			return err
		})
		if err != nil {
			t.Fatalf("warm pool: %v", err)
		}
	}
	full()
	w.crash(t)
	if err := w.start(); err != nil {
		t.Fatal(err)
	}
	full()
	seen := map[string]bool{}
	for _, sb := range w.fork(t, "py-base", 4) {
		w.answers(t, sb.ID)
		if got := w.exec(t, sb.ID, "hostname"); got != sb.ID+"\n" {
			t.Errorf("hostname of %s (%s) is %q", sb.ID, sb.Timing.Pool, got)
		}
		seen[sb.Timing.Pool] = true
		seen[w.eval(t, sb.ID, "__import__('uuid').uuid4().hex")] = true
	}
	if !seen["warm"] || len(seen) < 4+2 {
		t.Errorf("pools and random numbers of 4 forks, one more than the pool had: %v", seen)
	}
}

// TestLogsAndStats reads what real machines print and consume.
func TestLogsAndStats(t *testing.T) {
	w := running(t)
	if got := w.must(t, "logs", "--build", "py-base"); !strings.Contains(got, "==> capturing") {
		t.Errorf("build log of py-base is %q", got)
	}
	sb := w.fork(t, "py-base", 1)[0]
	w.exec(t, sb.ID, "echo '<3>said to the console' > /dev/kmsg")
	for range 2 { // what was read once is still there
		err := w.await(endPatience, func(context.Context) error {
			if got := w.must(t, "logs", sb.ID); !strings.Contains(got, "said to the console") {
				return errors.New("console is " + got)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	stats := decoded[[]forkd.Stat](t, w, "stats")
	if len(stats) != 1 {
		t.Fatalf("stats of %d sandboxes", len(stats))
	}
	u := stats[0].Usage
	if u.PSSKiB <= 0 || u.PrivateKiB <= 0 || u.SharedKiB <= 0 || u.GuestPagesKiB <= 0 || u.CPUMS <= 0 || time.Since(time.UnixMilli(u.LastActivityUnixMS)) > time.Minute {
		t.Errorf("usage is %+v", u)
	}
}
