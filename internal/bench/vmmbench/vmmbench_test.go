package vmmbench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func monitor(t *testing.T) []byte {
	t.Helper()
	if f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0); err != nil {
		t.Skipf("needs a usable /dev/kvm: %v", err)
	} else {
		f.Close()
	}
	path := filepath.Join(t.TempDir(), "forkd-vmm")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "forkd.dev/forkd/cmd/forkd-vmm")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestRun measures everything once, so that the names of the result and what it needs are
// proven; figures are not judged on a busy machine.
func TestRun(t *testing.T) {
	r, err := Run(t.Context(), Options{Program: monitor(t), Runs: 1})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", raw)
	var names map[string]json.RawMessage
	if err := json.Unmarshal(raw, &names); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"floor", "pooled", "unpooled", "rollback", "branch", "destroy_ms", "pss_kib", "private_dirty_kib"} {
		if names[n] == nil {
			t.Errorf("the result has no %s", n)
		}
	}
	for _, f := range []Forks{r.Floor, r.Pooled, r.Unpooled} {
		if f.Fork100MS <= 0 || f.ForkP50MS <= 0 {
			t.Errorf("forks %+v", f)
		}
	}
	if len(r.Rollback) != 3 || len(r.Branch) != 2 || r.PSSKiB <= 0 || r.PrivateDirtyKiB <= 0 {
		t.Errorf("%s", raw)
	}
	var text bytes.Buffer
	if err := WriteMarkdown(&text, r); err != nil || !strings.Contains(text.String(), "C floor") {
		t.Errorf("%s, %v", text.String(), err)
	}
	if charts, err := Charts(r); err != nil || len(charts[""]) == 0 {
		t.Errorf("chart of %d bytes, %v", len(charts[""]), err)
	}
}

// TestCanceled: a measurement that is given up leaves no process and no directory.
func TestCanceled(t *testing.T) {
	program := monitor(t)
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	ctx, cancel := context.WithCancel(t.Context())
	o := Options{Program: program, Runs: 1, Progress: func(step string) {
		if strings.Contains(step, "pooled") {
			cancel()
		}
	}}
	if _, err := Run(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) != 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
