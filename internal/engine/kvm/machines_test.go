package kvm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/test/realguest"
)

// TestMachines checks on real machines of two processors what the conformance suite does not:
// time, load while a machine is paused, a branch of a running program, going back often.
func TestMachines(t *testing.T) {
	needMachines(t)
	w := newYard(t)
	t.Run("time", w.testTime)
	t.Run("pause under load", w.testPauseUnderLoad)
	t.Run("branch of a running program", w.testBranch)
	t.Run("go back twenty times", w.testGoBack)
}

// yard is a driver with one captured machine that all tests fork.
type yard struct {
	d     *Driver
	dir   string
	root  engine.Root
	shape engine.Shape
	base  []engine.State
}

// yardPatience bounds each step; the rig is slow.
const yardPatience = 2 * time.Minute

func newYard(t *testing.T) *yard {
	t.Helper()
	h := realguest.Harness(t, nil)
	w := &yard{d: newDrivers(t, 2)(t).(*Driver), dir: h.Dir, root: h.Root, shape: h.Shape}
	w.shape.CPUs = 2
	t.Cleanup(func() {
		if err := w.d.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*yardPatience)
	defer cancel()
	m, err := w.d.Boot(ctx, w.spec(t))
	check(t, "boot", err)
	b := &resident{m: m}
	b.connect(ctx, t)
	check(t, "start the guest", realguest.Start(ctx, b.g))
	b.eval(t, "import time, os; captured = time.monotonic()")
	if n := b.eval(t, "print(os.cpu_count(), end='')"); n != "2" {
		t.Errorf("the guest sees %s processors", n)
	}
	w.base = b.capture(t, w, nil, engine.AfterEnd)
	return w
}

func check(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func (w *yard) spec(t *testing.T) engine.Spec {
	t.Helper()
	id := ident.New(ident.Sandbox)
	dir := filepath.Join(w.dir, id)
	check(t, "make directory", os.Mkdir(dir, 0o711))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), yardPatience)
		defer cancel()
		if err := w.d.Reap(ctx, id, dir); err != nil {
			t.Error(err)
		}
	})
	return engine.Spec{ID: id, Dir: dir, Shape: w.shape, Root: w.root}
}

// resident is a machine with its guest.
type resident struct {
	m engine.Machine
	g realguest.Guest
}

func (b *resident) connect(ctx context.Context, t *testing.T) {
	t.Helper()
	conn, err := b.m.DialAgent(ctx)
	check(t, "dial agent", err)
	g, err := realguest.Connect(ctx, conn)
	if err != nil {
		r, consoleErr := b.m.Console()
		if consoleErr == nil {
			text := make([]byte, 4096)
			n, _ := r.Read(text)
			t.Logf("console: %s", text[:n])
		}
		check(t, "connect to the agent", err)
	}
	b.g = g.(realguest.Guest)
	t.Cleanup(func() { _ = b.g.Close() })
}

// fork makes a running machine with an identity.
func (w *yard) fork(t *testing.T, chain []engine.State) *resident {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), yardPatience)
	defer cancel()
	m, err := w.d.Restore(ctx, w.spec(t), chain)
	check(t, "restore", err)
	b := &resident{m: m}
	conn, err := m.DialAgent(ctx)
	check(t, "dial agent", err)
	check(t, "resume", m.Resume(ctx))
	g, err := realguest.Connect(ctx, conn)
	check(t, "connect to the agent", err)
	b.g = g.(realguest.Guest)
	t.Cleanup(func() { _ = b.g.Close() })
	_, err = b.g.VerdictFork(ctx, someIdentity(m.ID()))
	check(t, "give identity", err)
	return b
}

func someIdentity(id string) agentwire.Identity {
	random := func(n int) []byte {
		b := make([]byte, n)
		rand.Read(b)
		return b
	}
	now := time.Now()
	return agentwire.Identity{
		SandboxID: id, Hostname: id, MachineID: hex.EncodeToString(random(16)), BootID: "6f1c2d3e-4a5b-4c6d-8e7f-0123456789ab",
		Token: hex.EncodeToString(random(32)), Entropy: random(64), Reseed: agentwire.ReseedAll, Generation: uint64(now.UnixMicro()), HostTime: now,
	}
}

func (b *resident) eval(t *testing.T, code string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), yardPatience)
	defer cancel()
	res, err := b.g.Eval(ctx, agentwire.EvalRequest{Code: code, Timeout: yardPatience})
	if err != nil {
		b.autopsy(t)
	}
	check(t, "eval "+code, err)
	if res.Error != "" {
		t.Fatalf("eval %q: %s", code, res.Error)
	}
	return string(res.Stdout)
}

func (b *resident) sh(t *testing.T, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), yardPatience)
	defer cancel()
	res, err := b.g.Exec(ctx, agentwire.ExecRequest{Argv: []string{"/bin/sh", "-c", script}, Timeout: yardPatience})
	if err != nil {
		b.autopsy(t)
	}
	check(t, "run "+script, err)
	if res.ExitCode != 0 {
		t.Fatalf("%q ended with %d: %s", script, res.ExitCode, res.Stderr)
	}
	return strings.TrimSpace(string(res.Stdout))
}

// autopsy logs what is known of a machine that does not answer.
func (b *resident) autopsy(t *testing.T) {
	t.Helper()
	m := b.m.(*Machine)
	select {
	case <-m.Done():
	case <-time.After(time.Second): // it may be ending
	}
	text, _ := os.ReadFile(filepath.Join(m.dir, consoleFile))
	t.Logf("machine %s: reason %q, monitor says %q, console: %s", m.ID(), m.Reason(), lastLine(filepath.Join(m.dir, logFile)), text[max(0, len(text)-3000):])
}

// capture stores the machine's state on top of parent.
func (b *resident) capture(t *testing.T, w *yard, parent []engine.State, after engine.After) []engine.State {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), yardPatience)
	defer cancel()
	check(t, "prepare the guest", b.g.Prepare(ctx, agentwire.Prepare{Sync: true}))
	check(t, "commit", b.g.Commit(ctx))
	_ = b.g.Close()
	dir, err := os.MkdirTemp(w.dir, "capture-")
	check(t, "make directory", err)
	res, err := b.m.Capture(ctx, engine.CaptureSpec{Dir: dir, Parent: parent, After: after})
	check(t, "capture", err)
	t.Logf("paused for %v, %d KiB copied meanwhile, %d KiB stored", res.Pause.Round(10*time.Microsecond), res.CopiedBytes>>10, res.LayerBytes>>10)
	if after == engine.AfterResume {
		b.connect(ctx, t)
		check(t, "verdict source", b.g.VerdictSource(ctx))
	}
	return append(append([]engine.State(nil), parent...), engine.State{ID: ident.New(ident.Snapshot), Dir: dir, Artifacts: res.Artifacts})
}

func (b *resident) kill(t *testing.T) {
	t.Helper()
	_ = b.g.Close()
	check(t, "kill", b.m.Kill(t.Context()))
}

// testTime: right after a restore the guest's monotonic clock goes on from where it was
// captured, at the host's rate.
func (w *yard) testTime(t *testing.T) {
	b := w.fork(t, w.base)
	since := number(t, b.eval(t, "print(time.monotonic() - captured, end='')"))
	if since < 0 || since > yardPatience.Seconds() {
		t.Errorf("%v s have passed for the guest since it was captured", since)
	}
	for range 3 {
		began := time.Now()
		slept := number(t, b.eval(t, "t = time.monotonic(); time.sleep(1); print(time.monotonic() - t, end='')"))
		took := time.Since(began)
		t.Logf("the guest slept %.3f s by its clock, %.3f s by ours with the call", slept, took.Seconds())
		if slept < 1 || slept > 3 || took < 900*time.Millisecond || took > 10*time.Second {
			t.Errorf("a sleep of one second took %.3f s by the guest's clock and %v by ours", slept, took)
		}
	}
	b.kill(t)
}

func number(t *testing.T, s string) float64 {
	t.Helper()
	n, err := strconv.ParseFloat(s, 64)
	check(t, "read a number of the guest", err)
	return n
}

// testPauseUnderLoad: fifty pauses while the guest writes to its disk, to its console and
// to the agent's channel lose nothing and hang nothing.
func (w *yard) testPauseUnderLoad(t *testing.T) {
	b := w.fork(t, w.base)
	b.sh(t, `(i=0; while :; do i=$((i+1)); echo "line $i of the flood" > /dev/console; done) >/dev/null 2>&1 &
(while :; do dd if=/dev/zero of=/root/load bs=64k count=32 conv=fsync; done) >/dev/null 2>&1 &`)
	const size = 4 << 20
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 2*yardPatience)
	defer cancel()
	wg.Go(func() {
		res, err := b.g.Exec(ctx, agentwire.ExecRequest{Argv: []string{"/bin/sh", "-c", "yes forkd | head -c " + strconv.Itoa(size) + " | md5sum; yes forkd | head -c 262144"}, Timeout: 2 * yardPatience})
		if err != nil || res.ExitCode != 0 {
			t.Errorf("output during pauses: %v, exit %d", err, res.ExitCode)
			return
		}
		want := strings.Repeat("forkd\n", 262144/6+1)[:262144]
		sum, out, _ := strings.Cut(string(res.Stdout), "\n")
		if out != want {
			t.Errorf("output during pauses has %d bytes (after %q), want %d equal ones", len(out), sum, len(want))
		}
	})
	for i := range 50 {
		check(t, "pause "+strconv.Itoa(i), b.m.Pause(ctx))
		check(t, "resume "+strconv.Itoa(i), b.m.Resume(ctx))
		if i%10 == 9 {
			check(t, "ping", b.g.Ping(ctx))
		}
	}
	wg.Wait()
	if got := b.sh(t, "wc -c < /root/load"); got == "" {
		t.Error("the file that was written meanwhile cannot be read")
	}
	b.kill(t)
}

// testBranch: a program that runs on while its machine is branched goes on in both, from
// the same point, and neither sees what the other does.
func (w *yard) testBranch(t *testing.T) {
	source := w.fork(t, w.base)
	source.sh(t, `cat > /root/count.py <<'EOF'
import os, time
n = 0
block = bytearray(32 << 20)
while True:
    n += 1
    for i in range(n % 16 * 4096, len(block), 16 * 4096):
        block[i] = n % 256
    with open('/root/counter.tmp', 'w') as f:
        f.write(str(n))
    os.rename('/root/counter.tmp', '/root/counter')
EOF
python3 /root/count.py >/dev/null 2>&1 &
while [ ! -e /root/counter ]; do :; done`)
	count := func(b *resident) int {
		t.Helper()
		n, err := strconv.Atoi(b.sh(t, "cat /root/counter"))
		check(t, "read the counter", err)
		return n
	}
	more := func(b *resident, than int) int {
		t.Helper()
		for {
			if n := count(b); n > than {
				return n
			}
		}
	}
	before := count(source)
	chain := source.capture(t, w, w.base, engine.AfterResume)
	later := more(source, count(source))
	child := w.fork(t, chain)
	source.sh(t, "echo source > /root/who")
	child.sh(t, "echo child > /root/who")
	inChild := more(child, before)
	t.Logf("counter: %d before, %d later in the source, %d in the child", before, later, inChild)
	more(child, inChild)
	more(source, later)
	if s, c := source.sh(t, "cat /root/who"), child.sh(t, "cat /root/who"); s != "source" || c != "child" {
		t.Errorf("source says %q, child %q", s, c)
	}
	grandchild := w.fork(t, child.capture(t, w, chain, engine.AfterEnd))
	more(grandchild, inChild)
	if got := grandchild.sh(t, "cat /root/who"); got != "child" {
		t.Errorf("the grandchild says %q", got)
	}
	source.kill(t)
	grandchild.kill(t)
}

// testGoBack: whatever is done to a machine, the next one of its checkpoint is as it was.
func (w *yard) testGoBack(t *testing.T) {
	b := w.fork(t, w.base)
	b.eval(t, "state = 'checkpoint'")
	b.sh(t, "echo checkpoint > /root/state; sync")
	point := b.capture(t, w, w.base, engine.AfterEnd)
	for i := range 20 {
		b = w.fork(t, point)
		if got := b.eval(t, "print(state, end='')"); got != "checkpoint" {
			t.Fatalf("after %d times memory has %q", i, got)
		}
		if got := b.sh(t, "cat /root/state"); got != "checkpoint" {
			t.Fatalf("after %d times the disk has %q", i, got)
		}
		b.eval(t, "state = 'spoiled'; junk = bytearray(os.urandom(1 << 20))")
		b.sh(t, "echo spoiled > /root/state; rm -f /usr/bin/perl; sync")
		b.kill(t)
	}
}
