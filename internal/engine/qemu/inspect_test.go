package qemu

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/test/realguest"
)

// inspectProcess checks on a running fork what an escaped guest could do: it is
// nobody, has no rights, sees an empty root and no network, and no descriptor it has
// can write what others read.
func inspectProcess(t *testing.T, m engine.Machine, chain []engine.State) {
	proc := filepath.Join("/proc", strconv.Itoa(m.PID()))
	inspectStatus(t, proc)
	inspectLimits(t, proc)
	root, err := os.Readlink(filepath.Join(proc, "root"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(proc, "root"))
	if err != nil || len(entries) > 0 || root == "/" {
		t.Errorf("the root of the process is %s with %d entries (%v)", root, len(entries), err)
	}
	for _, ns := range []string{"net", "ipc", "uts", "pid"} {
		ours, err1 := os.Readlink("/proc/self/ns/" + ns)
		theirs, err2 := os.Readlink(filepath.Join(proc, "ns", ns))
		if err1 != nil || err2 != nil || ours == theirs {
			t.Errorf("%s namespace: ours %s, its %s (%v, %v)", ns, ours, theirs, err1, err2)
		}
	}
	if devices := interfaces(t, proc); len(devices) != 1 || devices[0] != "lo" {
		t.Errorf("the process sees network interfaces %v", devices)
	}
	inspectDescriptors(t, proc, chain)
	inspectOverlays(t, m.(*Machine))
}

// inspectOverlays: once nothing is being merged any more, the machine has not many
// overlays, and QEMU has open as many files as that takes.
func inspectOverlays(t *testing.T, m *Machine) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for busy := true; busy; {
		m.mu.Lock()
		busy = m.restacking
		m.mu.Unlock()
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("overlays are still being merged after a minute")
		}
	}
	m.mu.Lock()
	overlays, failed := len(m.rec.Overlays), m.mergeFailed
	m.mu.Unlock()
	if failed || overlays > 2*maxOverlays {
		t.Errorf("the machine has %d overlays, merging failed: %t", overlays, failed)
	}
	fds, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(m.PID()), "fd"))
	if err != nil {
		t.Fatal(err)
	}
	if most := 40 + 2*(overlays+m.rec.Disks); len(fds) > most {
		t.Errorf("the process has %d descriptors with %d overlays on %d disk files", len(fds), overlays, m.rec.Disks)
	}
	files, err := filepath.Glob(filepath.Join(m.dir, "*.qcow2"))
	if err != nil || len(files) != overlays {
		t.Errorf("its directory has %d disk files (%v), it has %d overlays", len(files), err, overlays)
	}
}

func inspectStatus(t *testing.T, proc string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		t.Fatal(err)
	}
	status := map[string][]string{}
	for _, line := range strings.Split(string(b), "\n") {
		name, rest, _ := strings.Cut(line, ":")
		status[name] = strings.Fields(rest)
	}
	for _, which := range []string{"Uid", "Gid"} {
		for _, id := range status[which] {
			if n, err := strconv.Atoi(id); err != nil || n < firstUID {
				t.Errorf("%s of the process is %v", which, status[which])
				break
			}
		}
	}
	for name, want := range map[string]string{"NoNewPrivs": "1", "Seccomp": "2"} {
		if got := strings.Join(status[name], " "); got != want {
			t.Errorf("%s of the process is %q, want %s", name, got, want)
		}
	}
	for _, name := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		if got := strings.Join(status[name], ""); strings.Trim(got, "0") != "" {
			t.Errorf("%s of the process is %s", name, got)
		}
	}
	if groups := status["Groups"]; len(groups) > 1 || (len(groups) == 1 && groups[0] == "0") {
		t.Errorf("supplementary groups of the process are %v", groups)
	}
}

func inspectLimits(t *testing.T, proc string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(proc, "limits"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"Max open files":     strconv.Itoa(maxOpenFiles),
		"Max core file size": "0",
		"Max file size":      strconv.Itoa((realguest.DiskMiB + realguest.DiskMiB/8 + 64) << 20),
	}
	for _, line := range strings.Split(string(b), "\n") {
		for name, limit := range want {
			if rest, ok := strings.CutPrefix(line, name); ok {
				if f := strings.Fields(rest); len(f) < 2 || f[0] != limit || f[1] != limit {
					t.Errorf("limit of the process: %s, want %s", line, limit)
				}
				delete(want, name)
			}
		}
	}
	if len(want) > 0 {
		t.Errorf("limits not found: %v", want)
	}
	if adj, err := os.ReadFile(filepath.Join(proc, "oom_score_adj")); err != nil || strings.TrimSpace(string(adj)) != "500" {
		t.Errorf("oom score is %s, %v", adj, err)
	}
}

func interfaces(t *testing.T, proc string) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(proc, "net/dev"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, line := range strings.Split(string(b), "\n")[2:] {
		if name, _, ok := strings.Cut(line, ":"); ok {
			names = append(names, strings.TrimSpace(name))
		}
	}
	return names
}

// inspectDescriptors: files of the chain and the image are open for reading at most,
// the memory file is sealed, and the only regular file that can be written is the
// machine's own overlay (and its log).
func inspectDescriptors(t *testing.T, proc string, chain []engine.State) {
	t.Helper()
	shared := map[string]bool{}
	for _, s := range chain {
		for _, a := range s.Artifacts {
			shared[fileKey(t, filepath.Join(s.Dir, a.Name))] = true
		}
	}
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		t.Fatal(err)
	}
	writable, sealed := 0, 0
	for _, fd := range fds {
		link := filepath.Join(proc, "fd", fd.Name())
		target, err := os.Readlink(link)
		if err != nil {
			continue // closed meanwhile
		}
		info, err := os.Stat(link)
		if err != nil || !info.Mode().IsRegular() || strings.HasPrefix(target, "anon_inode:") {
			continue
		}
		if strings.HasPrefix(target, "/memfd:"+memimage.FileName) {
			sealed++
			if f, err := os.OpenFile(link, os.O_RDWR, 0); err == nil {
				if _, err := f.WriteAt([]byte{1}, 0); err == nil {
					t.Errorf("memory file %s can be written", target)
				}
				_ = f.Close()
			}
			continue
		}
		if !canWrite(t, proc, fd.Name()) {
			continue
		}
		writable++
		if shared[fileKey(t, link)] || strings.HasSuffix(target, ".ext4") {
			t.Errorf("descriptor %s can write shared file %s", fd.Name(), target)
		}
		if base := filepath.Base(target); !strings.HasPrefix(base, "disk") && base != logFile {
			t.Errorf("descriptor %s can write %s", fd.Name(), target)
		}
	}
	if sealed == 0 || writable == 0 {
		t.Errorf("%d memory files and %d writable files: not looked at the right process", sealed, writable)
	}
}

func fileKey(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

func canWrite(t *testing.T, proc, fd string) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(proc, "fdinfo", fd))
	if err != nil {
		return false
	}
	for _, line := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseInt(strings.TrimSpace(rest), 8, 64)
			if err != nil {
				t.Fatalf("flags of descriptor %s: %v", fd, err)
			}
			return flags&syscall.O_ACCMODE != syscall.O_RDONLY
		}
	}
	return false
}
