package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	forkd "forkd.dev/forkd/sdk/go"
)

// smallDisk is a daemon on a disk of its own that a test can fill.
type smallDisk struct {
	*world
	mount string
}

// onSmallDisk copies what the daemon has to a small file system in memory and
// starts a daemon there that keeps no space free.
func onSmallDisk(t *testing.T) smallDisk {
	t.Helper()
	const roomMiB = 300 // besides the copy
	w := running(t)
	w.stop(t)
	copied := []string{"forkd.db", "images", "initramfs", "kernels", "snapshots"}
	used := int64(0)
	for _, name := range copied {
		used += diskUsageOf(t, filepath.Join(w.data, name))
	}
	mount := w.smallMount()
	if err := os.Mkdir(mount, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("forkd-e2e", mount, "tmpfs", 0, fmt.Sprintf("mode=755,size=%d", used+roomMiB<<20)); err != nil {
		t.Skipf("cannot mount a file system: %v", err)
	}
	small := smallDisk{mount: mount, world: &world{
		dir: w.dir, bin: w.bin, data: filepath.Join(mount, "data"), tmp: w.tmp, addr: w.addr, client: w.client,
		settings: []string{"FORKD_MIN_FREE=0"},
	}}
	t.Cleanup(func() { small.remove(t) })
	if err := os.Mkdir(small.data, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range copied {
		cmd := exec.Command("cp", "-a", "--sparse=always", filepath.Join(w.data, name), small.data)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", cmd, err, out)
		}
	}
	small.restart(t)
	return small
}

func (w *world) smallMount() string { return filepath.Join(w.dir, "small") }

// dropSmallDisk removes the small disk of a test that was cut short.
func (w *world) dropSmallDisk() error {
	mount := w.smallMount()
	if len(linesWith("/proc/self/mountinfo", mount)) == 0 {
		return nil
	}
	for _, p := range processesOf(mount) {
		_ = unix.Kill(p.pid, unix.SIGKILL) // it may have ended
	}
	return waitUntil(endPatience, func() error { return unix.Unmount(mount, 0) })
}

func (d smallDisk) remove(t *testing.T) {
	t.Helper()
	d.free(t)
	d.restart(t)
	d.killAll(t)
	d.stop(t)
	if err := waitUntil(endPatience, func() error { return unix.Unmount(d.mount, 0) }); err != nil {
		t.Errorf("unmount %s: %v", d.mount, err)
	}
	if err := os.Remove(d.mount); err != nil {
		t.Error(err)
	}
}

// available is how many bytes can still be written.
func (d smallDisk) available(t *testing.T) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(d.mount, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Bavail) * st.Bsize
}

func (d smallDisk) ballast() string { return filepath.Join(d.mount, "ballast") }

// fill leaves some bytes of the disk free.
func (d smallDisk) fill(t *testing.T, leave int64) {
	t.Helper()
	d.free(t)
	f, err := os.Create(d.ballast())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	eventually(t, func() error { // the daemon writes, too
		n := d.available(t) - leave
		if n <= 0 {
			return nil
		}
		info, err := f.Stat()
		if err != nil {
			return err
		}
		if err := unix.Fallocate(int(f.Fd()), 0, info.Size(), n); err != nil {
			return fmt.Errorf("fill the disk with %d bytes: %w", n, err)
		}
		return nil
	})
}

func (d smallDisk) free(t *testing.T) {
	t.Helper()
	if err := os.Remove(d.ballast()); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestDiskFull fills the daemon's disk before and within what needs it: it says so,
// what runs goes on, and nothing half-made stays.
func TestDiskFull(t *testing.T) {
	d := onSmallDisk(t)
	sb := d.fork(t, "py-base", 1)[0]
	d.eval(t, sb.ID, "mine = 'kept'; import os; blob = os.urandom(40 << 20); 1")
	d.exec(t, sb.ID, "echo kept > /root/mine; sync")
	if _, err := d.client.Checkpoint(t.Context(), sb.ID, forkd.CheckpointRequest{Sync: true}); err != nil {
		t.Fatal(err)
	}
	before := d.available(t)
	for _, leave := range []int64{0, 8 << 20} {
		for name, call := range map[string]func(context.Context) error{
			"branch": func(ctx context.Context) error {
				_, err := d.client.Branch(ctx, sb.ID, forkd.BranchRequest{Tag: "never", Mode: "full"})
				return err
			},
			"snapshot": func(ctx context.Context) error {
				_, err := d.client.CreateSnapshot(ctx, forkd.SnapshotRequest{Tag: "never", From: "py-base", Warm: "import os; blob = os.urandom(20 << 20)"}, nil)
				return err
			},
			"image": func(ctx context.Context) error {
				_, err := d.client.BuildImage(ctx, forkd.ImageRequest{Name: "never", Packages: []string{"hello"}}, nil)
				return err
			},
		} {
			d.fill(t, leave)
			err := call(t.Context())
			if !errors.Is(err, forkd.ErrResourceExhausted) {
				t.Errorf("%s with %d bytes free: %v", name, leave, err)
			}
			d.free(t)
			d.checkKept(t, sb.ID, name)
		}
	}
	d.checkSnapshots(t, "full")
	if lost := before - d.available(t); lost > 8<<20 {
		t.Errorf("%d bytes of the disk are not free again", lost)
	}
	if _, err := d.client.Rollback(t.Context(), sb.ID, ""); err != nil {
		t.Errorf("rollback: %v", err)
	}
	d.checkKept(t, sb.ID, "rollback")
}

// TestDiskFullForGuests: guests that write while the host's disk is full go on when
// it is not full any more, also under another daemon.
func TestDiskFullForGuests(t *testing.T) {
	d := onSmallDisk(t)
	list := d.fork(t, "py-base", 2)
	for _, sb := range list {
		d.eval(t, sb.ID, "mine = 'kept'; mine")
		d.exec(t, sb.ID, "echo kept > /root/mine; sync")
	}
	d.standStill(t, list[0].ID)
	if got := d.eval(t, list[1].ID, "mine"); got != "'kept'" {
		t.Errorf("who does not write holds %s", got)
	}
	d.free(t)
	d.goOn(t, list[0].ID)
	d.checkKept(t, list[0].ID, "when the disk has space")
	d.standStill(t, list[0].ID)
	d.crash(t)
	if err := d.start(); err != nil {
		t.Errorf("start on a full disk: %v", err)
	}
	d.free(t)
	d.restart(t)
	for _, sb := range list {
		d.goOn(t, sb.ID)
		d.checkKept(t, sb.ID, "after the disk was full")
		d.exec(t, sb.ID, "echo new > /root/new && sync && cat /root/new")
	}
}

// standStill has a guest write to a full disk.
func (d smallDisk) standStill(t *testing.T, id string) {
	t.Helper()
	d.fill(t, 0)
	d.exec(t, id, "(head -c 20000000 /dev/urandom > /root/much; sync) > /dev/null 2>&1 &")
	eventually(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := d.client.Ping(ctx, id)
		if !errors.Is(err, forkd.ErrResourceExhausted) || forkd.Hint(err) == "" {
			return fmt.Errorf("a guest that writes to a full disk: %w", err)
		}
		return nil
	})
}

// goOn waits until a guest does not stand still any more.
func (d smallDisk) goOn(t *testing.T, id string) {
	t.Helper()
	eventually(t, func() error {
		_, err := d.client.Ping(t.Context(), id)
		return err
	})
}

// checkKept: a sandbox holds what the test gave it.
func (d smallDisk) checkKept(t *testing.T, id, after string) {
	t.Helper()
	if got := d.eval(t, id, "mine"); got != "'kept'" {
		t.Errorf("%s: %s holds %s", after, id, got)
	}
	if got := d.exec(t, id, "cat /root/mine"); got != "kept\n" {
		t.Errorf("%s: %s reads %q", after, id, got)
	}
	for _, dir := range []string{"snapshots", "images"} {
		for _, name := range namesIn(filepath.Join(d.data, dir)) {
			if strings.HasPrefix(name, ".") {
				t.Errorf("%s: %s/%s is left", after, dir, name)
			}
		}
	}
}
