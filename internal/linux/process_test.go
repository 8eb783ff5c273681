package linux

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// startChild runs a program that ends when its stdin does.
func startChild(t *testing.T) (*exec.Cmd, Process) {
	t.Helper()
	cmd := exec.Command("cat")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	p, err := Identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, p
}

func TestProcessKillAndWait(t *testing.T) {
	cmd, p := startChild(t)
	if !p.Alive() {
		t.Fatal("a started child is not alive")
	}
	waited := make(chan error, 1)
	go func() { waited <- p.Wait(t.Context()) }()
	if err := p.Kill(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err != nil {
		t.Fatal(err)
	}
	if p.Alive() {
		t.Error("a zombie counts as alive")
	}
	_ = cmd.Wait()
	if _, err := p.Open(); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("open of a reaped process: %v, want ErrNotFound", err)
	}
	if err := p.Kill(unix.SIGKILL); err != nil {
		t.Errorf("kill of a reaped process: %v, want nil", err)
	}
	if err := p.Wait(t.Context()); err != nil {
		t.Errorf("wait for a reaped process: %v, want nil", err)
	}
}

func TestProcessIsNotItsPID(t *testing.T) {
	_, p := startChild(t)
	stranger := Process{PID: p.PID, Start: p.Start + 1}
	if stranger.Alive() {
		t.Error("another start time counts as the same process")
	}
	if err := stranger.Kill(unix.SIGKILL); err != nil {
		t.Errorf("kill of a process whose pid was reused: %v, want nil", err)
	}
	if !p.Alive() {
		t.Error("the signal went to the process that only has the same pid")
	}
}

func TestProcessWaitCanceled(t *testing.T) {
	_, p := startChild(t)
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error, 1)
	go func() { waited <- p.Wait(ctx) }()
	cancel()
	if err := <-waited; !errors.Is(err, context.Canceled) {
		t.Fatalf("wait with a canceled context: %v", err)
	}
	h, err := p.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := h.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("wait beyond the deadline: %v", err)
	}
	// A canceled wait leaves the handle usable.
	if err := h.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := h.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestProcessFacts(t *testing.T) {
	self, err := Self()
	if err != nil {
		t.Fatal(err)
	}
	before, err := CPUTime(self.PID)
	if err != nil {
		t.Fatal(err)
	}
	for sum, i := 0, 0; i < 20_000_000; i++ {
		sum += i * sum
	}
	after, err := CPUTime(self.PID)
	if err != nil || after <= before {
		t.Errorf("cpu time went from %v to %v (%v)", before, after, err)
	}
	m, err := ReadProcessMemory(self.PID)
	if err != nil || m.RSSKiB < 500 || m.PSSKiB > m.RSSKiB || m.PrivateKiB > m.RSSKiB {
		t.Errorf("memory of this process: %+v (%v)", m, err)
	}
	h, err := ReadHostMemory()
	if err != nil || h.AvailableKiB > h.TotalKiB || h.TotalKiB < m.RSSKiB {
		t.Errorf("host memory: %+v (%v)", h, err)
	}
	id, err := BootID()
	if err != nil || len(id) != 36 {
		t.Errorf("boot id %q (%v)", id, err)
	}
}

func TestNoSuchProcess(t *testing.T) {
	const beyond = 1 << 22 // PID_MAX_LIMIT: never a pid
	for name, err := range map[string]error{
		"start":  errOf(ProcessStart(beyond)),
		"cpu":    errOf(CPUTime(beyond)),
		"memory": errOf(ReadProcessMemory(beyond)),
		"open":   errOf(Process{PID: beyond}.Open()),
	} {
		if !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("%s of a missing process: %v, want ErrNotFound", name, err)
		}
	}
	for _, pid := range []int{0, -1} {
		if _, err := ProcessStart(pid); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("start of process %d: %v, want ErrInvalid", pid, err)
		}
	}
}

func errOf[T any](_ T, err error) error { return err }

func TestParseStatHostileName(t *testing.T) {
	line := []byte("12 (x) R 1 (y)) S 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 1 1")
	st, err := parseStat(line)
	if err != nil || st.state != 'S' || st.start != 4711 {
		t.Errorf("parseStat = %+v, %v", st, err)
	}
}

func FuzzParseStat(f *testing.F) {
	own, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(own)
	f.Add([]byte("1 (a) S"))
	f.Add([]byte(")"))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, err := parseStat(b)
		if err == nil && !bytes.Contains(b, []byte{st.state}) {
			t.Errorf("state %q is not in the input", st.state)
		}
		parseKiBTable(b)
	})
}
