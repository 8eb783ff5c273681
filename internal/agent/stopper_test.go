package agent

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"
)

// startShell starts a shell that has a child and a grandchild.
func startShell(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", "sh -c 'sleep 100 & echo ready; wait' & wait")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, pid := range append(descendants(cmd.Process.Pid), cmd.Process.Pid) {
			if p, err := os.FindProcess(pid); err == nil {
				_ = p.Kill()
			}
		}
		_ = cmd.Wait()
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	return cmd
}

func TestDescendants(t *testing.T) {
	pid := startShell(t).Process.Pid
	if n := len(descendants(pid)); n != 2 {
		t.Errorf("%d processes are below the shell, want 2", n)
	}
	if !slices.Contains(descendants(os.Getpid()), pid) {
		t.Error("a child is no descendant")
	}
}

// TestStopperHolds stops what it may see of a tree and lets it go on: the whole machine
// is the user's only inside of a sandbox, so the test gives it one process at a time.
func TestStopperHolds(t *testing.T) {
	pid := startShell(t).Process.Pid
	s := newStopper()
	seen := map[int]bool{}
	for _, p := range allProcesses() {
		seen[p] = p != pid && !slices.Contains(descendants(pid), p)
	}
	for p, others := range seen {
		if !others {
			delete(seen, p)
		}
	}
	deadline, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for s.stopNew(seen) {
		if deadline.Err() != nil {
			t.Fatal("the processes did not stop")
		}
	}
	for _, p := range append(descendants(pid), pid) {
		if !standsStill(p) {
			t.Errorf("process %d moves", p)
		}
	}
	if err := s.letAll(); err != nil {
		t.Fatal(err)
	}
	if state, _, ok := readStat("/proc/" + strconv.Itoa(pid)); !ok || state == 'T' {
		t.Errorf("the shell is in state %c after letAll", state)
	}
	if len(s.held) != 0 {
		t.Errorf("still held: %v", s.held)
	}
}
