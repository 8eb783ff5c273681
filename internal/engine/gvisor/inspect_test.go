package gvisor

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/engine"
)

// inspectSandbox looks at the processes of a running sandbox: what an escaped guest
// would find.
func inspectSandbox(t *testing.T, m engine.Machine, _ []engine.State) {
	own := map[string]string{}
	for _, ns := range []string{"net", "mnt", "user", "ipc", "uts"} { // the platform needs the host's pid namespace
		own[ns] = readlink(t, os.Getpid(), "ns/"+ns)
	}
	g := m.(*Machine)
	for _, pid := range append([]int{g.rec.PID}, children(g.rec.PID)...) {
		status := statusOf(t, pid)
		if status["Uid:"] == "0" {
			t.Errorf("process %d (%s) has uid 0 on the host", pid, status["Name:"])
		}
		if got := status["Uid:"]; got != strconv.Itoa(g.rec.UID) {
			t.Errorf("process %d has uid %s, want %d, which is this machine's alone", pid, got, g.rec.UID)
		}
		if status["NoNewPrivs:"] != "1" || status["Seccomp:"] != "2" {
			t.Errorf("process %d has no_new_privs %s, seccomp %s", pid, status["NoNewPrivs:"], status["Seccomp:"])
		}
		for ns, id := range own {
			if readlink(t, pid, "ns/"+ns) == id {
				t.Errorf("process %d shares the %s namespace with the daemon", pid, ns)
			}
		}
		entries, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/root")
		if err != nil {
			t.Error(err)
		}
		for _, e := range entries {
			if e.Name() != "proc" && e.Name() != "etc" && e.Name() != "sys" {
				t.Errorf("the root of process %d holds %s", pid, e.Name())
			}
		}
	}
}

func readlink(t *testing.T, pid int, name string) string {
	t.Helper()
	to, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/" + name)
	if err != nil {
		t.Error(err)
	}
	return to
}

// statusOf reads the first value of each line of a process's status.
func statusOf(t *testing.T, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 {
			out[f[0]] = f[1]
		}
	}
	return out
}
