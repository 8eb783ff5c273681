package kvm

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
)

// inspectProcess checks on a running fork what an escaped guest could do: it is nobody, has no
// rights and an empty root, and no descriptor it has can write what others read.
func inspectProcess(t *testing.T, m engine.Machine, chain []engine.State) {
	proc := filepath.Join("/proc", strconv.Itoa(m.PID()))
	inspectStatus(t, proc)
	root, err := os.ReadDir(filepath.Join(proc, "root"))
	if err != nil || len(root) > 0 {
		t.Errorf("the root of the process has %d entries (%v)", len(root), err)
	}
	for _, ns := range []string{"ipc", "uts"} {
		ours, err1 := os.Readlink("/proc/self/ns/" + ns)
		theirs, err2 := os.Readlink(filepath.Join(proc, "ns", ns))
		if err1 != nil || err2 != nil || ours == theirs {
			t.Errorf("%s namespace: ours %s, its %s (%v, %v)", ns, ours, theirs, err1, err2)
		}
	}
	inspectDescriptors(t, proc, chain)
}

func inspectStatus(t *testing.T, proc string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		t.Fatal(err)
	}
	status := map[string]string{}
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(line, ":")
		status[name] = strings.Join(strings.Fields(rest), " ")
	}
	for _, which := range []string{"Uid", "Gid"} {
		for id := range strings.FieldsSeq(status[which]) {
			if n, err := strconv.Atoi(id); err != nil || n < firstUID {
				t.Errorf("%s of the process is %s", which, status[which])
				break
			}
		}
	}
	for name, want := range map[string]string{
		"NoNewPrivs": "1", "Seccomp": "2", "Groups": "",
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapAmb": "0000000000000000",
	} {
		if got := status[name]; got != want {
			t.Errorf("%s of the process is %q, want %q", name, got, want)
		}
	}
	limits, err := os.ReadFile(filepath.Join(proc, "limits"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(limits)) {
		if rest, ok := strings.CutPrefix(line, "Max open files"); ok && strings.Fields(rest)[1] != strconv.Itoa(maxOpenFiles) {
			t.Errorf("limit of the process: %s", line)
		}
		if rest, ok := strings.CutPrefix(line, "Max core file size"); ok && strings.Fields(rest)[1] != "0" {
			t.Errorf("limit of the process: %s", line)
		}
	}
}

// inspectDescriptors: files of the chain and the image are open for reading at most, and the
// only regular files that can be written are the machine's own.
func inspectDescriptors(t *testing.T, proc string, chain []engine.State) {
	t.Helper()
	shared := map[string]bool{}
	for _, s := range chain {
		for _, a := range s.Artifacts {
			shared[filepath.Join(s.Dir, a.Name)] = true
		}
	}
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		t.Fatal(err)
	}
	own := 0
	for _, fd := range fds {
		link := filepath.Join(proc, "fd", fd.Name())
		target, err := os.Readlink(link)
		if err != nil {
			continue // closed meanwhile
		}
		if target == "/dev/kvm" {
			t.Errorf("descriptor %s is /dev/kvm: its guest could make machines", fd.Name())
		}
		info, err := os.Stat(link)
		if err != nil || !info.Mode().IsRegular() || strings.HasPrefix(target, "anon_inode:") || !canWrite(t, proc, fd.Name()) {
			continue
		}
		base := filepath.Base(target)
		switch {
		case shared[target] || strings.HasSuffix(target, ".ext4") || strings.HasPrefix(target, "/memfd:"+memimage.FileName):
			t.Errorf("descriptor %s can write shared file %s", fd.Name(), target)
		case strings.HasPrefix(base, "disk"), base == logFile, base == consoleFile:
			own++
		default:
			t.Errorf("descriptor %s can write %s", fd.Name(), target)
		}
	}
	if own == 0 {
		t.Error("the process writes no file of its own: not looked at the right one")
	}
}

func canWrite(t *testing.T, proc, fd string) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(proc, "fdinfo", fd))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(b)) {
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
