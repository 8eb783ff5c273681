package qemu

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
)

// confinement is how a QEMU process is locked in. As root it starts with all
// rights, opens its files and then, before the first guest instruction, enters an
// empty root and gives up its uid for good; the namespaces are new from the
// start. As an ordinary user only seccomp and the limits remain.
type confinement struct {
	root bool
	uid  int    // of this machine alone
	dir  string // empty directory that becomes the root
}

func (c confinement) args() []string {
	// -runas calls setuid after the filter is in place, so elevateprivileges
	// cannot be denied there; no_new_privs comes with the filter either way, so
	// there is nothing to elevate with.
	elevate := "deny"
	if c.root {
		elevate = "allow"
	}
	a := []string{"-sandbox", "on,obsolete=deny,elevateprivileges=" + elevate + ",spawn=deny,resourcecontrol=deny"}
	if c.root {
		a = append(a, "-runas", fmt.Sprintf("%d:%d", c.uid, c.uid), "-chroot", c.dir)
	}
	return a
}

func (c confinement) sysProcAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true}
	if c.root {
		attr.Cloneflags = syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWPID
	}
	return attr
}

// applied and lost describe the confinement in words, for doctor.
func (c confinement) applied() []string {
	a := []string{"no_new_privs", "seccomp (no spawn, no resource control)", "limits on descriptors and file size"}
	if c.root {
		a = append(a, "own uid per machine", "empty root", "own network, pid, ipc and uts namespace without interfaces")
	}
	return a
}

func (c confinement) lost() []string {
	if c.root {
		return nil
	}
	return []string{"own uid per machine (needs root)", "empty root (needs root)", "network namespace (needs root)"}
}

// maxOpenFiles is set on purpose: QEMU sizes tables by it, and an escaped guest
// gets no more. A machine needs about 25, and two more for each disk layer: of its
// snapshot's ancestors, and of its own captures.
const maxOpenFiles = 1024

// start runs QEMU. The log file receives what QEMU itself says.
func (d *Driver) start(p *process, logPath string) (*exec.Cmd, error) {
	args, fds := p.args()
	log, err := os.OpenFile(logPath, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log of %s: %w", p.name, err)
	}
	defer log.Close()
	cmd := exec.Command("/bin/sh", append(p.limits(d.binary), args...)...)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/bin:/bin", "MALLOC_ARENA_MAX=2"}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = fds.files
	cmd.SysProcAttr = p.confine.sysProcAttr()
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w: %w", filepath.Base(d.binary), err, errdefs.ErrUnavailable)
	}
	// Under memory pressure a sandbox goes before the daemon does.
	adj := fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid)
	if err := os.WriteFile(adj, []byte("500"), 0); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, fmt.Errorf("set oom score of %s: %w", p.name, err)
	}
	return cmd, nil
}

// limitScript runs its arguments with limits on open files and on the size of files
// in blocks of 512 bytes. QEMU cannot be limited from outside once it has given up
// its uid, unless we have CAP_SYS_RESOURCE, which root in a container has not.
const limitScript = `ulimit -c 0 && ulimit -n "$1" && ulimit -f "$2" && shift 2 && exec "$@"`

// limits are the arguments of a shell that becomes binary with limits on what an
// escaped guest could take. The file size covers the overlay with its metadata, and
// the memory file, which QEMU sizes by ftruncate.
func (p *process) limits(binary string) []string {
	blocks := max(p.shape.DiskMiB+p.shape.DiskMiB/8, p.shape.MemoryMiB) + 64
	blocks *= 1 << 20 / 512
	return []string{"-c", limitScript, "forkd", strconv.Itoa(maxOpenFiles), strconv.Itoa(blocks), binary}
}
