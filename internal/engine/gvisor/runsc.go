package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
)

// call is one run of runsc, which works on a sandbox and ends.
type call struct {
	args []string
	// stdio are descriptors 0 to 2, which init inherits when a sandbox is made; nil
	// leaves them empty.
	stdio []*os.File
	// enter puts the process into the machine's control group before it becomes
	// runsc; nil leaves it where we are.
	enter func(pid int) error
	// home is the directory that a sandbox to be made has its agent from.
	home string
}

// flags precede every command. Those of a checkpoint and of its restores must be equal.
func (d *Driver) flags() []string {
	return append([]string{"--root=" + d.runDir, "--platform=" + platform, "--network=none", "--ignore-cgroups=true", "--overlay2=root:memory", "--cpu-num-from-quota=true"}, d.extraFlags...)
}

// findExtraFlags returns flags that only newer programs know.
func findExtraFlags(ctx context.Context, runsc string) ([]string, error) {
	out, err := exec.CommandContext(ctx, runsc, "flags").CombinedOutput()
	if err != nil {
		return nil, errdefs.New(errdefs.ErrUnavailable, "ask %s for its flags: %w", runsc, err)
	}
	// A restored sandbox has another uid on the host than the captured one had, which
	// newer programs refuse unless told.
	if strings.Contains(string(out), "-restore-spec-validation") {
		return []string{"--restore-spec-validation=ignore"}, nil
	}
	return nil, nil
}

// waitScript becomes its arguments once its control group is settled: what runsc
// starts must be born there. The first two are what to lay where before, or empty.
const waitScript = `read -r _ <&3 || exit 125; exec 3<&-; ulimit -c 0
[ -z "$1" ] || mount --bind "$1" "$2" || exit 125
shift 2; exec "$@"`

// run runs runsc to its end. What it prints on an error is on stderr, which is the
// last of c.stdio if that is set.
func (d *Driver) run(ctx context.Context, c call) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ready, settled, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("run runsc: %w", err)
	}
	defer ready.Close()
	defer settled.Close()
	lay := c.home
	if d.stage == "" {
		lay = ""
	}
	argv := append([]string{"-c", waitScript, "forkd", lay, d.stage, d.cfg.Runsc}, d.flags()...)
	cmd := exec.CommandContext(ctx, "/bin/sh", append(argv, c.args...)...)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.ExtraFiles = []*os.File{ready}
	cmd.SysProcAttr = d.sysProcAttr()
	if lay != "" {
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS // which makes all mounts private
	}
	var said strings.Builder
	if len(c.stdio) == 3 {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = c.stdio[0], c.stdio[1], c.stdio[2]
	} else {
		cmd.Stderr = &limited{b: &said}
	}
	if err := cmd.Start(); err != nil {
		return errdefs.New(errdefs.ErrUnavailable, "start %s: %w", filepath.Base(d.cfg.Runsc), err)
	}
	if c.enter != nil {
		if err := c.enter(cmd.Process.Pid); err != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			return err
		}
	}
	_, werr := settled.WriteString("\n")
	err = cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return &runscError{command: c.args[0], err: errors.Join(err, werr), said: lastLine(said.String())}
	}
	return nil
}

// sysProcAttr gives runsc a session of its own. An ordinary user is made root of a
// new user namespace, which has no network.
func (d *Driver) sysProcAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true}
	if !d.isRoot {
		attr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	return attr
}

// runscError is a runsc that failed. What it says is bounded; some of it may be the
// word of a sandbox.
type runscError struct {
	command string
	err     error
	said    string
}

func (e *runscError) Error() string {
	if e.said == "" {
		return fmt.Sprintf("runsc %s: %v", e.command, e.err)
	}
	return fmt.Sprintf("runsc %s: %v: %s", e.command, e.err, e.said)
}

func (e *runscError) Unwrap() error { return e.err }

// limited keeps the first of what is written.
type limited struct{ b *strings.Builder }

const maxSaid = 8 << 10

func (l *limited) Write(p []byte) (int, error) {
	l.b.Write(p[:min(len(p), max(maxSaid-l.b.Len(), 0))])
	return len(p), nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	last := lines[len(lines)-1]
	return last[:min(len(last), 300)]
}
