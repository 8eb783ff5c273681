package machine

import (
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/tinyguest"
	"forkd.dev/forkd/internal/vmm/memory"
)

const base = 64 * mib // of the guest's memory, as its command line has it by default

// TestRollback: after each rollback, memory is that of the snapshot, and the guest does again
// what it did from there, at the same place.
func TestRollback(t *testing.T) {
	for name, cow := range map[string]string{"copied back": "cow=200", "dropped": "cow=8000"} {
		t.Run(name, func(t *testing.T) {
			s := openKVM(t)
			parent, _ := boot(t, s, "touch=4 wait=1 base=48 "+cow)
			first := take(t, parent, nil, false)
			child, u := restore(t, s, first)
			u.expect(t, child, tinyguest.Resumed)
			for i := range 20 {
				err := child.Rollback(Rollback{Plan: first.plan, State: first.state, ToParent: i%2 == 0})
				if err != nil {
					t.Fatal(err)
				}
				same(t, child, first)
				generations++
				if err := child.writeGeneration([16]byte{generations, 2}); err != nil {
					t.Fatal(err)
				}
				if err := child.Resume(); err != nil {
					t.Fatal(err)
				}
				u.expect(t, child, tinyguest.Resumed)
			}
		})
	}
}

// same compares the memory of a paused machine with a snapshot.
func same(t *testing.T, m *Machine, s *snap) {
	t.Helper()
	for page := uint64(0); page < guestMiB*mib/pageSize; page++ {
		got, err := m.mem.Slice(memory.Address(page*pageSize), pageSize)
		if err != nil {
			t.Fatal(err)
		}
		if want := s.content(t, page); string(got) != string(want) {
			t.Fatalf("page %#x differs from the snapshot", page)
		}
	}
}

// TestRollbackToCheckpoint: a machine goes back to its own captures in any order, over
// layers that it is not mapped from.
func TestRollbackToCheckpoint(t *testing.T) {
	s := openKVM(t)
	parent, _ := boot(t, s, "touch=4 wait=1 cow=5 hot=300 mode=work")
	first := take(t, parent, nil, false)
	child, u := restore(t, s, first)
	u.expect(t, child, tinyguest.Resumed)
	below := first
	var checkpoints []*snap
	for range 4 {
		waitRounds(t, child, 300, 3)
		c := take(t, child, below, true)
		child.Stored()
		checkpoints = append(checkpoints, c)
		below = c
	}
	for _, i := range []int{3, 0, 2, 1, 3, 3, 0} {
		waitRounds(t, child, 300, 2)
		if err := child.Rollback(Rollback{Plan: checkpoints[i].plan, State: checkpoints[i].state}); err != nil {
			t.Fatal(err)
		}
		same(t, child, checkpoints[i])
		if err := child.Resume(); err != nil {
			t.Fatal(err)
		}
	}
}

// waitRounds waits until the working guest has rewritten its hot pages n more times.
func waitRounds(t *testing.T, m *Machine, hot, n uint64) {
	t.Helper()
	at := base + hot*pageSize
	// Before its first round the page holds the mark of an earlier pass over memory.
	const mark = 1 << 32
	wait(t, m, func() bool { return wordAt(t, m, at) < mark })
	first := wordAt(t, m, at)
	wait(t, m, func() bool { return wordAt(t, m, at) >= first+n })
}

// wait polls the guest's memory, which is the only event there is, once a tick.
func wait(t *testing.T, m *Machine, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !done() {
		select {
		case <-tick.C:
		case <-m.Ended():
			t.Fatalf("the machine ended: %s", m.End().Reason)
		case <-deadline:
			t.Fatal("the guest makes no progress")
		}
	}
}

// TestCaptureIsOneInstant: pages that the guest writes in a fixed order are captured as they
// were at one moment: all before some place have one mark, all after it the one before.
func TestCaptureIsOneInstant(t *testing.T) {
	for name, cmdline := range map[string]string{
		"in the pause":  "touch=1 wait=1 cow=2 hot=1500 mode=work",
		"while running": "touch=1 wait=1 cow=6000 hot=1500 mode=work", // more than smallCapture
	} {
		t.Run(name, func(t *testing.T) {
			const hot = 1500
			s := openKVM(t)
			parent, _ := boot(t, s, cmdline)
			first := take(t, parent, nil, false)
			child, u := restore(t, s, first)
			u.expect(t, child, tinyguest.Resumed)
			below := first
			for i := range 10 {
				waitRounds(t, child, hot, 1)
				c := take(t, child, below, true)
				if i%3 != 2 { // a capture that is not stored loses nothing
					child.Stored()
					below = c
				}
				checkInstant(t, c, hot)
				t.Logf("%d pages in %d rounds, %d copied in a pause of %v", c.done.Pages, c.done.Rounds, c.done.CopiedPages, c.done.Pause)
			}
			if name == "while running" && child.mem.Tracking() != true {
				t.Error("nothing was tracked")
			}
			// What was captured runs.
			grandchild, _ := restore(t, s, below)
			waitRounds(t, grandchild, hot, 2)
		})
	}
}

func checkInstant(t *testing.T, c *snap, hot uint64) {
	t.Helper()
	mark := func(i uint64) uint64 {
		return binary.LittleEndian.Uint64(c.content(t, base/pageSize+i)) - i
	}
	newest := mark(0)
	dropped := false
	for i := uint64(1); i < hot; i++ {
		m := mark(i)
		switch {
		case m == newest && !dropped:
		case m == newest-1<<32:
			dropped = true
		default:
			t.Fatalf("page %d has mark %#x, the first has %#x, older before: %v", i, m, newest, dropped)
		}
	}
	rounds := binary.LittleEndian.Uint64(c.content(t, base/pageSize+hot))
	if rounds != newest>>32 && rounds != newest>>32-1 {
		t.Errorf("the guest has counted %d rounds, its pages say %d", rounds, newest>>32)
	}
}

// TestPauseResume: a guest that never leaves by itself is stopped each time, and goes on
// where it was.
func TestPauseResume(t *testing.T) {
	s := openKVM(t)
	m, _ := boot(t, s, "touch=1 hot=4 mode=work")
	at := uint64(base + 4*pageSize)
	waitRounds(t, m, 4, 1)
	last := uint64(0)
	for range 300 {
		wait(t, m, func() bool { return wordAt(t, m, at) > last })
		m.Pause()
		m.Pause()
		last = wordAt(t, m, at)
		if again := wordAt(t, m, at); again != last {
			t.Fatalf("a paused guest went from %d to %d", last, again)
		}
		if err := m.Resume(); err != nil {
			t.Fatal(err)
		}
		if err := m.Resume(); err != nil {
			t.Fatal(err)
		}
	}
	// Without any time to get into the guest.
	for range 300 {
		if err := m.Resume(); err != nil {
			t.Fatal(err)
		}
		m.Pause()
	}
}

// TestHostileGuests: whatever a guest does, it ends with a stated reason or goes on, and its
// machine can be paused and closed.
func TestHostileGuests(t *testing.T) {
	s := openKVM(t)
	for _, mode := range []string{"fault", "garbage", "flood", "spin"} {
		t.Run(mode, func(t *testing.T) {
			m, _ := boot(t, s, "touch=1 mode="+mode)
			if mode == "garbage" || mode == "flood" {
				waitOrEnd(t, m, func() bool { return m.Exits() > 20_000 })
			}
			if mode == "fault" {
				select {
				case <-m.Ended():
				case <-time.After(patience):
					t.Fatal("a triple fault does not end the machine")
				}
				if reason := m.End().Reason; !strings.Contains(reason, "triple fault") && !strings.Contains(reason, "KVM") {
					t.Errorf("reason %q", reason)
				}
			}
			m.Pause()
		})
	}
}

// waitOrEnd is wait for a machine that may end.
func waitOrEnd(t *testing.T, m *Machine, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !done() {
		select {
		case <-tick.C:
		case <-m.Ended():
			t.Log("ended:", m.End().Reason)
			return
		case <-deadline:
			t.Fatal("the guest makes no progress")
		}
	}
}
