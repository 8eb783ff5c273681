package e2e

import (
	"strings"
	"testing"

	forkd "forkd.dev/forkd/sdk/go"
)

// TestColdFork: a branch that was taken without writing file systems out boots from its
// disk; the file system replays its journal and is clean, what was synced before is
// there, nothing of the memory is, and diff and fork warn.
func TestColdFork(t *testing.T) {
	w := running(t)
	source := w.counting(t)
	w.exec(t, source.ID, "echo kept >/root/kept && sync && echo later >/root/later")
	b, err := w.client.Branch(t.Context(), source.ID, forkd.BranchRequest{Tag: "cold-source"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.killAll(t)
		w.cli(t, "snapshot", "rm", "--cascade", b.ID)
	})
	if b.Disk != "journal" {
		t.Errorf("the disk of a branch is %q", b.Disk)
	}
	got := w.cli(t, "fork", "--cold", "cold-source", "-q")
	if got.code != 0 || !strings.Contains(got.stderr, "loss of power") {
		t.Fatalf("forkd fork --cold: %+v", got)
	}
	id := strings.TrimSpace(got.stdout)
	if text := w.exec(t, id, "cat /root/kept; pgrep -f counter.py || echo none"); text != "kept\nnone\n" {
		t.Errorf("the cold fork says %q", text)
	}
	if v := w.eval(t, id, "6*7"); v != "42" {
		t.Errorf("its interpreter says %q", v)
	}
	// What it wrote is written out, and nothing more: then its disk can be checked.
	const check = `echo mine >/root/mine; sync; echo u >/proc/sysrq-trigger
for i in $(seq 100); do grep -q ' / ext4 ro' /proc/mounts && break; sleep 0.1; done
e2fsck -fn /dev/vda 2>&1; echo "exit $?"`
	if text := w.exec(t, id, check); !strings.HasSuffix(text, "exit 0\n") {
		t.Errorf("the file system of the cold fork is not clean:\n%s", text)
	}
	// A checkpoint of a cold fork stands alone, and the next one is a difference to it.
	second := w.forkAs(t, forkd.ForkRequest{SnapshotTag: "cold-source", N: forkd.Int(1), Cold: true})[0]
	point, err := w.client.Checkpoint(t.Context(), second.ID, forkd.CheckpointRequest{Sync: true})
	if err != nil || point.ParentID != "" {
		t.Fatalf("a checkpoint of a cold fork: %+v, %v", point, err)
	}
	w.exec(t, second.ID, "rm /root/kept")
	if _, err := w.client.Rollback(t.Context(), second.ID, point.ID); err != nil {
		t.Fatal(err)
	}
	if text := w.exec(t, second.ID, "cat /root/kept"); text != "kept\n" {
		t.Errorf("after a rollback it says %q", text)
	}
	diff := w.cli(t, "diff", "py-base", "cold-source")
	if diff.code != 0 || !strings.Contains(diff.stdout, "A /root/later\n") || !strings.Contains(diff.stderr, "without writing its file systems out") {
		t.Errorf("forkd diff: %+v", diff)
	}
}
