package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/linux"
	forkd "forkd.dev/forkd/sdk/go"
)

// The promises about an idle fork.
const (
	maxPSSMiB      = 26.0
	maxIdlePercent = 0.8
	maxClockOffset = 50 * time.Millisecond
)

// TestFork50 forks 50 sandboxes from prepared but unused processes and looks at
// what they answer, cost and share.
func TestFork50(t *testing.T) {
	w := running(t)
	const n = 50
	began := time.Now()
	children := decoded[[]forkd.Sandbox](t, w, "fork", "--tag", "py-base", "-n", fmt.Sprint(n))
	t.Logf("measured: %d forks in %.1f s", n, time.Since(began).Seconds())
	if len(children) != n {
		t.Fatalf("%d sandboxes instead of %d", len(children), n)
	}
	t.Run("EachAnswersWithNumpy", func(t *testing.T) {
		each(t, children, func(_ int, sb forkd.Sandbox) error {
			res, err := w.client.Eval(t.Context(), sb.ID, forkd.EvalRequest{Code: "import numpy; numpy.__version__"})
			if err == nil && (res.Error != nil || !strings.HasPrefix(text(res.Result), "'")) {
				err = fmt.Errorf("%s: %s, error %s", sb.ID, text(res.Result), text(res.Error))
			}
			return err
		})
	})
	t.Run("Memory", func(t *testing.T) { w.checkMemory(t, children) })
	t.Run("IdleCPU", func(t *testing.T) { checkIdle(t, children) })
	t.Run("ReceiptListsEveryStep", func(t *testing.T) {
		for _, sb := range children {
			checkReceipt(t, sb)
		}
	})
	t.Run("EverythingDiffers", func(t *testing.T) { w.checkUnique(t, children) })
	t.Run("ListAndKillAll", func(t *testing.T) {
		if got := len(strings.Fields(w.must(t, "ls", "-q"))); got != n {
			t.Errorf("ls -q lists %d sandboxes", got)
		}
		w.must(t, "kill", "--all")
		if got := w.must(t, "ls", "-q"); got != "" {
			t.Errorf("after kill --all: %q", got)
		}
	})
}

func (w *world) checkMemory(t *testing.T, children []forkd.Sandbox) {
	var pss, private []float64
	for _, sb := range children {
		got, err := w.client.Sandbox(t.Context(), sb.ID)
		if err != nil || got.Usage == nil {
			t.Fatalf("usage of %s: %+v, %v", sb.ID, got.Usage, err)
		}
		pss = append(pss, float64(got.Usage.PSSKiB)/1024)
		private = append(private, float64(got.Usage.PrivateKiB)/1024)
	}
	t.Logf("measured: PSS per child: mean %.1f MiB, largest %.1f MiB; private: mean %.1f MiB", mean(pss), slices.Max(pss), mean(private))
	if mean(pss) > maxPSSMiB {
		t.Errorf("a child takes %.1f MiB, more than %.1f", mean(pss), maxPSSMiB)
	}
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// checkIdle compares the processor time of the machines' processes over a window
// in which nobody asks them anything.
func checkIdle(t *testing.T, children []forkd.Sandbox) {
	const window = 10 * time.Second
	used := func() time.Duration {
		sum := time.Duration(0)
		for _, sb := range children {
			cpu, err := linux.CPUTime(*sb.PID)
			if err != nil {
				t.Fatal(err)
			}
			sum += cpu
		}
		return sum
	}
	before, began := used(), time.Now()
	timer := time.NewTimer(window)
	defer timer.Stop()
	<-timer.C
	spent := used() - before
	percent := 100 * spent.Seconds() / time.Since(began).Seconds() / float64(len(children))
	t.Logf("measured: idle child: %.2f %% of a core", percent)
	if percent > maxIdlePercent {
		t.Errorf("an idle child takes %.2f %% of a core, more than %.1f", percent, maxIdlePercent)
	}
}

// checkReceipt compares a receipt with the fork contract, which fixes the order.
func checkReceipt(t *testing.T, sb forkd.Sandbox) {
	t.Helper()
	want := []string{
		"kernel_csprng", "wall_clock", "hostname", "machine_id", "boot_id", "ssh_host_keys", "token", "env",
		"generation_file", "runner:python", "tcp_connections", "thaw",
	}
	if sb.Receipt == nil {
		t.Fatalf("%s has no receipt", sb.ID)
	}
	var names []string
	for _, s := range sb.Receipt.Steps {
		names = append(names, s.Name)
		if s.Status != "done" && s.Status != "absent" {
			t.Errorf("%s: step %s is %s: %s", sb.ID, s.Name, s.Status, s.Detail)
		}
	}
	if !slices.Equal(names, want) {
		t.Errorf("%s: receipt lists\n%v, want\n%v", sb.ID, names, want)
	}
	if off := time.Duration(sb.Receipt.ClockOffsetMS * float64(time.Millisecond)); off.Abs() > maxClockOffset {
		t.Errorf("%s: its clock is off by %v", sb.ID, off)
	}
}

// uniqueCode returns as JSON what must differ between forks, and the wall clock.
const uniqueCode = `
import os, uuid, random, numpy, secrets, tempfile, socket, json, time
def _collect():
    def read(path):
        with open(path) as f:
            return f.read().strip()
    return json.dumps({
        "kernel random": os.urandom(16).hex(),
        "uuid.uuid4": str(uuid.uuid4()),
        "random.random": repr(random.random()),
        "numpy.random.rand": repr(float(numpy.random.rand())),
        "numpy.random.default_rng": repr(float(numpy.random.default_rng().random())),
        "secrets": secrets.token_hex(16),
        "tempfile": tempfile.mktemp(),
        "hostname": socket.gethostname(),
        "machine-id": read("/etc/machine-id"),
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "token": read("/run/forkd/token"),
        "generation": read("/run/forkd/generation"),
        "time": repr(time.time()),
    })
print(_collect())
`

// checkUnique asks every child once and compares the answers pairwise.
func (w *world) checkUnique(t *testing.T, children []forkd.Sandbox) {
	answers := make([]map[string]string, len(children))
	each(t, children, func(i int, sb forkd.Sandbox) error {
		before := time.Now()
		res, err := w.client.Eval(t.Context(), sb.ID, forkd.EvalRequest{Code: uniqueCode})
		after := time.Now()
		if err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(res.Stdout), &answers[i]); err != nil {
			return fmt.Errorf("%s: %q, error %s: %w", sb.ID, res.Stdout, text(res.Error), err)
		}
		var seconds float64
		if _, err := fmt.Sscan(answers[i]["time"], &seconds); err != nil {
			return err
		}
		guest := time.UnixMicro(int64(seconds * 1e6))
		if guest.Before(before.Add(-maxClockOffset)) || guest.After(after.Add(maxClockOffset)) {
			t.Errorf("%s: guest clock %v is not within %v of [%v, %v]", sb.ID, guest, maxClockOffset, before, after)
		}
		return nil
	})
	owner := map[string]string{}
	for i, answer := range answers {
		for name, value := range answer {
			if name == "time" {
				continue
			}
			key := name + " " + value
			if other, taken := owner[key]; taken || value == "" {
				t.Errorf("%s: %s and %s share %q", name, other, children[i].ID, value)
			}
			owner[key] = children[i].ID
		}
		if answer["hostname"] != children[i].ID {
			t.Errorf("hostname of %s is %q", children[i].ID, answer["hostname"])
		}
	}
}
