package e2e

import (
	"fmt"
	"os"
	"strconv"
	"testing"

	forkd "forkd.dev/forkd/sdk/go"
)

// tornLook gives the warm interpreter a look at the pages and the disk of
// testdata/torn.py, from the last written to the first, and a wait for some rounds.
const tornLook = `
import json, mmap, os, struct, time
torn_size = 64 << 20
torn_words = memoryview(mmap.mmap(os.open("/run/torn", os.O_RDWR), torn_size)).cast("Q")
torn_disk = os.open("/root/torn", os.O_RDWR | os.O_DIRECT)
torn_back = mmap.mmap(-1, 4096)
def torn_look():
    os.preadv(torn_disk, [torn_back], 0)
    d = struct.unpack_from("Q", torn_back)[0]
    b = torn_words[torn_size // 8 - 1]
    return {"d": d, "b": b, "a": torn_words[0], "torn": torn_words[torn_size // 16]}
def torn_rounds():
    first = torn_look()
    end = time.monotonic() + 20
    while torn_words[0] < first["a"] + 20 and not torn_words[torn_size // 16] and time.monotonic() < end:
        time.sleep(0.005)
    return {"first": first, "last": torn_look()}
True`

type tornSeen struct{ First, Last struct{ D, B, A, Torn int } }

// check tells whether what was seen can have been.
func (s tornSeen) check(after int) error {
	switch {
	case s.First.Torn+s.Last.Torn != 0:
		return fmt.Errorf("the program saw its memory and disk apart: %+v", s)
	case s.First.D > s.First.B || s.First.B > s.First.A:
		return fmt.Errorf("what is written first is older: %+v", s)
	case s.Last.A < s.First.A+20 || s.Last.D <= s.First.D:
		return fmt.Errorf("the program does not go on: %+v", s)
	case s.First.A < after:
		return fmt.Errorf("%+v is from before %d", s, after)
	}
	return nil
}

// TestNoBranchIsTorn: a program writes one growing number to two distant pages and to
// the disk in a fixed order. Whatever the instant of a live branch, with user processes
// frozen or running, no child ever finds another order.
func TestNoBranchIsTorn(t *testing.T) {
	w := running(t)
	branches := 30
	if *long {
		branches = 200
	}
	program, err := os.ReadFile("testdata/torn.py")
	if err != nil {
		t.Fatal(err)
	}
	id := w.fork(t, "py-base", 1)[0].ID
	w.eval(t, id, fmt.Sprintf("open('/root/torn.py', 'w').write(%s)", strconv.Quote(string(program))))
	w.exec(t, id, "setsid python3 /root/torn.py >/root/torn.log 2>&1 </dev/null &")
	w.holds(t, id, "test -s /root/torn || { cat /root/torn.log; exit 1; }")
	w.eval(t, id, tornLook)
	last, moved := 0, 0
	for i := range branches {
		child, drop := w.tornChild(t, id, i)
		seen := evalJSON[tornSeen](t, w, child, "torn_rounds()")
		if err := seen.check(last); err != nil {
			t.Errorf("branch %d: %v", i, err)
		}
		if seen.First.A > last {
			moved++
		}
		last = seen.First.A
		w.must(t, "kill", child)
		drop()
	}
	if err := evalJSON[tornSeen](t, w, id, "torn_rounds()").check(0); err != nil {
		t.Errorf("the source after %d branches: %v", branches, err)
	}
	t.Logf("measured: %d live branches up to count %d, none torn", branches, last)
	if moved < branches/2 {
		t.Errorf("the source went on between %d of %d branches only", moved, branches)
	}
}

// tornChild forks a running sandbox: every other time by a branch that freezes nothing.
func (w *world) tornChild(t *testing.T, id string, i int) (child string, drop func()) {
	t.Helper()
	if i%2 == 0 {
		return w.forkAs(t, forkd.ForkRequest{SnapshotTag: id})[0].ID, func() {}
	}
	b, err := w.client.Branch(t.Context(), id, forkd.BranchRequest{Mode: "live", Freeze: forkd.Bool(false)})
	if err != nil {
		t.Fatal(err)
	}
	return w.fork(t, b.ID, 1)[0].ID, func() { w.must(t, "snapshot", "rm", b.ID) }
}
