package e2e

import (
	"fmt"
	"strings"
	"testing"

	forkd "forkd.dev/forkd/sdk/go"
)

// watcher is a program that writes down every generation it sees.
const watcher = `
import os, time
with open("/root/watcher.pid", "w") as f:
    f.write(str(os.getpid()))
last = None
while True:
    with open("/run/forkd/generation") as f:
        now = f.read().strip()
    if now and now != last:
        last = now
        with open("/root/seen", "a") as f:
            f.write(now + "\n")
    time.sleep(0.1)
`

// TestRunningProgramSeesGeneration: a program that ran in the parent runs on in
// each fork, and learns from the generation file that it is in another machine.
func TestRunningProgramSeesGeneration(t *testing.T) {
	w := running(t)
	w.snapshot(t, "watched",
		"--exec", "cat > /root/watcher.py <<'END'\n"+watcher+"END",
		"--exec", "setsid python3 /root/watcher.py </dev/null >/dev/null 2>&1 &",
		"--exec", "for i in $(seq 100); do test -s /root/seen && exit 0; sleep 0.2; done; exit 1")
	children := w.fork(t, "watched", 2)
	parent := ""
	for _, sb := range children {
		var seen []string
		eventually(t, func() error {
			seen = strings.Fields(w.exec(t, sb.ID, "cat /root/seen"))
			if last := seen[len(seen)-1]; last != fmt.Sprint(sb.Receipt.Generation) {
				return fmt.Errorf("%s: the program saw %v, not %d", sb.ID, seen, sb.Receipt.Generation)
			}
			return nil
		})
		if len(seen) < 2 || (parent != "" && seen[0] != parent) {
			t.Errorf("%s: the program saw %v", sb.ID, seen)
		}
		parent = seen[0]
		w.exec(t, sb.ID, "grep -q watcher.py /proc/$(cat /root/watcher.pid)/cmdline")
	}
}

// TestForkIsItsOwn: what a fork is given is in it and in no sibling.
func TestForkIsItsOwn(t *testing.T) {
	w := running(t)
	sb := w.forkAs(t, forkd.ForkRequest{
		SnapshotTag: "py-base", N: forkd.Int(1), Name: "worker-1",
		Labels: map[string]string{"team": "a"}, Env: map[string]string{"GREETING": "hello"},
	})[0]
	other := w.fork(t, "py-base", 1)[0]
	if got := w.exec(t, "worker-1", "hostname; echo $GREETING"); got != "worker-1\nhello\n" {
		t.Errorf("in the named fork: %q", got)
	}
	if got := w.eval(t, sb.ID, "import os; os.environ.get('GREETING')"); got != "'hello'" {
		t.Errorf("environment in its interpreter: %s", got)
	}
	if got := w.exec(t, other.ID, "echo \"[$GREETING]\""); got != "[]\n" {
		t.Errorf("in its sibling: %q", got)
	}
	for key, want := range map[string]string{"team": "a", "forkd.parent": sb.SnapshotID, "forkd.index": "0"} {
		if sb.Labels[key] != want {
			t.Errorf("label %s is %q, want %q", key, sb.Labels[key], want)
		}
	}
	// The interpreter is warm: the module is there without an import.
	if got := w.eval(t, other.ID, "numpy.zeros(3).sum()"); !strings.Contains(got, "0.0") {
		t.Errorf("numpy in a warm fork: %s", got)
	}
}
