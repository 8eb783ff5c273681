package machine

import (
	"testing"

	"forkd.dev/forkd/internal/tinyguest"
)

// TestRollbackTracked: a machine whose writes are tracked goes back to its last stored capture
// by what was written since, also after captures in between that nobody stored.
func TestRollbackTracked(t *testing.T) {
	const hot = 300
	s := openKVM(t)
	parent, _ := boot(t, s, "touch=1 wait=1 cow=6000 hot=300 mode=work")
	first := take(t, parent, nil, false)
	child, u := restore(t, s, first)
	u.expect(t, child, tinyguest.Resumed)
	checkpoint := take(t, child, first, true)
	child.Stored()
	if !child.mem.Tracking() {
		t.Fatal("writes are not tracked")
	}
	for i := range 6 {
		waitRounds(t, child, hot, 2)
		if i%2 == 1 {
			take(t, child, checkpoint, true)
			waitRounds(t, child, hot, 2)
		}
		if err := child.Rollback(Rollback{Plan: checkpoint.plan, State: checkpoint.state, ToParent: true}); err != nil {
			t.Fatal(err)
		}
		same(t, child, checkpoint)
		if err := child.Resume(); err != nil {
			t.Fatal(err)
		}
	}
}
