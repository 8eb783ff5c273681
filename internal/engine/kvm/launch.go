package kvm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmhost"
	"forkd.dev/forkd/internal/vmmwire"
)

// process is a forkd-vmm that was started. Its sockets and log are in dir.
type process struct {
	cmd   *exec.Cmd
	id    linux.Process
	proc  *linux.ProcessHandle
	uid   int
	shape vmmwire.Shape
	token string // of a blank one
	dir   string
}

// maxOpenFiles is set on purpose: an escaped guest gets no more. A machine needs about 20,
// two for each layer of its disk and those of one message.
const maxOpenFiles = 512

// slackMiB is what files may have beyond disk and memory: maps of layers, headers.
const slackMiB = 64

// start runs a monitor that is prepared for a shape, with its sockets in dir.
func (d *Driver) start(name, dir string, shape engine.Shape) (_ *process, err error) {
	control, err := linux.ListenPackets(filepath.Join(dir, controlSocket))
	if err != nil {
		return nil, err
	}
	defer control.Close()
	log, err := os.OpenFile(filepath.Join(dir, logFile), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log of %s: %w", name, err)
	}
	defer log.Close()
	p := &process{shape: vmmwire.Shape{CPUs: shape.CPUs, MemoryMiB: shape.MemoryMiB}, dir: dir}
	if d.isRoot {
		p.uid = d.pickUID()
	}
	l := vmmhost.Launch{
		Program: d.program, Control: control, KVM: d.kvm, Log: log,
		Process: vmmwire.Process{
			Name: name, Shape: p.shape, UID: p.uid, MaxFiles: maxOpenFiles,
			MaxFileMiB: max(shape.DiskMiB+shape.DiskMiB/8, shape.MemoryMiB) + slackMiB,
		},
	}
	if p.uid != 0 {
		l.Root = d.empty
	}
	if p.cmd, err = vmmhost.Start(l); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.kill()
		}
	}()
	pid := p.cmd.Process.Pid
	// Under memory pressure a sandbox goes before the daemon does.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte("500"), 0); err != nil {
		return nil, fmt.Errorf("set oom score of %s: %w", name, err)
	}
	if p.id, err = linux.Identify(pid); err != nil {
		return nil, err
	}
	p.proc, err = p.id.Open()
	return p, err
}

// kill ends a process that is no machine yet and reaps it.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	if p.proc != nil {
		_ = p.proc.Close()
	}
}

// alive tells whether the process still runs.
func (p *process) alive() bool { return p.id.Alive() }

// move puts sockets and log of a blank process into the directory of its machine.
func (p *process) move(dir string) error {
	for _, name := range []string{controlSocket, logFile} {
		if err := os.Rename(filepath.Join(p.dir, name), filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("claim a prepared process: %w", err)
		}
	}
	err := os.Remove(p.dir)
	p.dir = dir
	return err
}

// sayWhy adds to err what the monitor wrote to its log last.
func sayWhy(err error, dir string) error {
	if line := lastLine(filepath.Join(dir, logFile)); line != "" {
		return fmt.Errorf("%w (the monitor says: %s)", err, line)
	}
	return err
}

// confinement describes in words what is applied to a process, and what is lost here.
func (d *Driver) confinement() (applied, lost []string) {
	applied = []string{"no_new_privs", "seccomp (a list of allowed calls per kind of thread; no way to the network)", "limits on descriptors and file size"}
	own := []string{"own uid per machine", "empty root", "own ipc and uts namespace"}
	if d.isRoot {
		applied = append(applied, own...)
	} else {
		for _, what := range own {
			lost = append(lost, what+" (needs root)")
		}
	}
	if l := d.limits.Lost(); l != "" {
		lost = append(lost, l)
	} else {
		applied = append(applied, "cgroup limits on memory and processes")
	}
	return applied, lost
}
