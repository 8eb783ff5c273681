package e2e

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/linux"
	forkd "forkd.dev/forkd/sdk/go"
)

// TestForksDoNotSeeEachOther writes different data to one path in two forks, on
// disk and in memory, and compares the snapshot before and after.
func TestForksDoNotSeeEachOther(t *testing.T) {
	w := running(t)
	dirs := []string{"snapshots", "images", "kernels", "initramfs"}
	before := w.digests(t, dirs)
	if len(before) < 4 {
		t.Fatalf("only %d files are compared: %v", len(before), before)
	}
	list := w.fork(t, "py-base", 2)
	for _, sb := range list {
		w.exec(t, sb.ID, "echo by-"+sb.ID+" > /root/same; echo by-"+sb.ID+" >> /etc/motd; sync")
		w.eval(t, sb.ID, "numpy.set_printoptions(precision=3); shared = '"+sb.ID+"'; shared")
	}
	for _, sb := range list {
		if got := w.exec(t, sb.ID, "cat /root/same; tail -n 1 /etc/motd"); got != "by-"+sb.ID+"\nby-"+sb.ID+"\n" {
			t.Errorf("%s reads %q", sb.ID, got)
		}
		if got := w.eval(t, sb.ID, "shared"); got != "'"+sb.ID+"'" {
			t.Errorf("%s holds %s", sb.ID, got)
		}
	}
	fresh := w.fork(t, "py-base", 1)[0]
	if got := w.exec(t, fresh.ID, "ls /root/same 2>&1; grep -c by-sb /etc/motd; true"); !strings.Contains(got, "No such file") || !strings.HasSuffix(got, "\n0\n") {
		t.Errorf("a later fork sees %q", got)
	}
	w.killAll(t)
	if after := w.digests(t, dirs); !maps.Equal(before, after) {
		for name := range after {
			if before[name] != after[name] {
				t.Errorf("%s changed", name)
			}
		}
		t.Errorf("%d files before, %d after", len(before), len(after))
	}
}

// digests hashes the data of every file below the folders of the data directory.
func (w *world) digests(t *testing.T, dirs []string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, dir := range dirs {
		err := filepath.WalkDir(filepath.Join(w.data, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			out[path], err = digest(path)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// digest hashes the data of a file with its place; holes are skipped.
func digest(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	for off := int64(0); ; {
		start, end, ok, err := linux.NextData(f, off)
		if err != nil {
			return "", err
		}
		if !ok {
			return fmt.Sprintf("%x", h.Sum(nil)), nil
		}
		fmt.Fprintf(h, "%d-%d:", start, end)
		if _, err := io.Copy(h, io.NewSectionReader(f, start, end-start)); err != nil {
			return "", err
		}
		off = end
	}
}

// TestMachineProcessIsConfined looks at every process that runs a guest, prepared
// ones too, from the host.
func TestMachineProcessIsConfined(t *testing.T) {
	w := running(t)
	uids := map[string]string{}
	for id, p := range w.settled(t, w.fork(t, "py-base", 3)) {
		st := status(t, p.pid)
		uid := strings.Fields(st["Uid"])
		if uid[0] == "0" || slices.ContainsFunc(uid, func(u string) bool { return u != uid[0] }) {
			t.Errorf("%s: uids %v", id, uid)
		}
		if other, taken := uids[uid[0]]; taken {
			t.Errorf("%s and %s have the same uid %s", id, other, uid[0])
		}
		uids[uid[0]] = id
		for field, want := range map[string]string{
			"NoNewPrivs": "1", "Seccomp": "2", "Groups": uid[0],
			"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapAmb": "0000000000000000",
		} {
			if st[field] != want {
				t.Errorf("%s: %s is %q, want %q", id, field, st[field], want)
			}
		}
		checkRoot(t, id, p.pid)
		for _, ns := range []string{"net", "ipc", "uts", "pid"} {
			if sameNamespace(t, ns, p.pid) {
				t.Errorf("%s shares the %s namespace of the host", id, ns)
			}
		}
	}
}

// settled returns the machines of all processes, prepared ones too. One that is
// just being prepared opens its files first and then locks itself in, before it
// has anything of a guest; it is waited for. The forks themselves never are.
func (w *world) settled(t *testing.T, forks []forkd.Sandbox) map[string]process {
	t.Helper()
	found := machines(w.data)
	for _, sb := range forks {
		if _, ok := found[sb.ID]; !ok {
			t.Fatalf("%s has no process", sb.ID)
		}
	}
	for id, p := range found {
		if slices.ContainsFunc(forks, func(sb forkd.Sandbox) bool { return sb.ID == id }) {
			continue
		}
		eventually(t, func() error {
			if uid := strings.Fields(status(t, p.pid)["Uid"]); uid[0] == "0" {
				return fmt.Errorf("%s is still root", id)
			}
			return nil
		})
	}
	return found
}

// checkRoot: the process sees an empty directory instead of the host.
func checkRoot(t *testing.T, id string, pid int) {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil || len(entries) > 0 {
		t.Errorf("%s: its root holds %v, %v", id, entries, err)
	}
}

func sameNamespace(t *testing.T, name string, pid int) bool {
	t.Helper()
	ours, err1 := os.Readlink("/proc/self/ns/" + name)
	theirs, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, name))
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return ours == theirs
}

// TestNoDescriptorCanWriteASnapshot looks at every descriptor of every machine's
// process: what can be written is its own, and the shared memory is sealed.
func TestNoDescriptorCanWriteASnapshot(t *testing.T) {
	w := running(t)
	for id, p := range w.settled(t, w.fork(t, "py-base", 3)) {
		sealed := 0
		dir := fmt.Sprintf("/proc/%d/fd", p.pid)
		for _, name := range namesIn(dir) {
			path := filepath.Join(dir, name)
			target, err := os.Readlink(path)
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case strings.HasPrefix(target, "/memfd:forkd"):
				sealed++
				if !immutable(t, path) {
					t.Errorf("%s: descriptor %s, %s, is not sealed against writing", id, name, target)
				}
			case strings.HasPrefix(target, "/") && writable(t, p.pid, name):
				own := filepath.Join(w.data, "sandboxes", id) + "/"
				if !strings.HasPrefix(target, own) && target != "/dev/null" {
					t.Errorf("%s: descriptor %s can write %s", id, name, target)
				}
			}
		}
		if sealed == 0 {
			t.Errorf("%s: no memfd was found", id)
		}
	}
}

func immutable(t *testing.T, path string) bool {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return linux.IsImmutable(f)
}

// writable reads the access mode of a descriptor.
func writable(t *testing.T, pid int, fd string) bool {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if octal, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseUint(strings.TrimSpace(octal), 8, 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(flags)&(os.O_WRONLY|os.O_RDWR) != 0
		}
	}
	t.Fatalf("fdinfo of %d has no flags", pid)
	return false
}
