package guest

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
)

// statusKiB returns a memory figure of the agent.
func (r *rig) statusKiB(key string) int {
	r.t.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(r.cmd.Process.Pid) + "/status")
	if err != nil {
		r.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == key+":" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	r.t.Fatalf("no %s", key)
	return 0
}

func TestLargeOutputIsHeldOnce(t *testing.T) {
	rig := startAgent(t)
	c := rig.connect()
	mustExec(t, c, "true")
	idle := rig.statusKiB("VmRSS")
	for range 3 {
		res, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"head", "-c", "70M", "/dev/zero"}, OutputLimit: agentwire.MaxOutputLimit})
		if err != nil || len(res.Stdout) != agentwire.MaxOutputLimit || !res.StdoutTruncated {
			t.Fatalf("%d bytes, %v", len(res.Stdout), err)
		}
	}
	peak := rig.statusKiB("VmHWM")
	if limit := idle + (agentwire.MaxOutputLimit+24<<20)>>10; peak > limit {
		t.Errorf("peak of %d KiB, idle %d", peak, idle)
	}
	ctx := testContext(t)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for rig.statusKiB("VmRSS") > idle+8<<10 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("still %d KiB, idle %d", rig.statusKiB("VmRSS"), idle)
		}
	}
	t.Logf("idle %d KiB, peak %d KiB", idle, peak)
}
