// Command init is PID 1 of the nested rig's L1 machine: it loads modules from the
// initramfs, moves to the root disk, runs the plan it finds there, reports over a
// virtio port and powers off. It is built by test/nested, never by hand.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/linux"

	"forkd.dev/forkd/test/nested/plan"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "nested: init failed:", err)
	}
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func run() error {
	if err := boot(); err != nil {
		return err
	}
	out, err := openReport()
	if err != nil {
		return err
	}
	defer out.Close()
	b, err := os.ReadFile(plan.File)
	if err != nil {
		return fmt.Errorf("read the plan: %w", err)
	}
	var commands []plan.Command
	if err := json.Unmarshal(b, &commands); err != nil {
		return fmt.Errorf("read the plan: %w", err)
	}
	for _, c := range commands {
		if err := perform(out, c); err != nil {
			return err
		}
	}
	_, err = io.WriteString(out, plan.Mark{Name: "all", End: true}.Line())
	return err
}

// openReport waits for the port, which appears some time after its driver starts.
// The machine has only this one.
func openReport() (*os.File, error) {
	const step, patience = 20 * time.Millisecond, 20 * time.Second
	for deadline := time.Now().Add(patience); ; <-time.After(step) {
		ports, err := filepath.Glob("/dev/vport*")
		if err != nil {
			return nil, err
		}
		if len(ports) > 0 {
			f, err := os.OpenFile(ports[0], os.O_WRONLY, 0)
			if err != nil {
				return nil, fmt.Errorf("open the report port: %w", err)
			}
			return f, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("no report port appeared within %v", patience)
		}
	}
}

// boot leaves the process on the root disk with the file systems that tests expect.
func boot() error {
	if err := mountAll("", []mount{
		{"devtmpfs", "/dev", "devtmpfs", ""}, {"proc", "/proc", "proc", ""}, {"sysfs", "/sys", "sysfs", ""},
	}); err != nil {
		return err
	}
	list, err := os.ReadFile("/modules/order")
	if err != nil {
		return fmt.Errorf("read the list of modules: %w", err)
	}
	for _, name := range strings.Fields(string(list)) {
		module, err := os.ReadFile("/modules/" + name + ".ko")
		if err == nil {
			err = unix.InitModule(module, "")
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load module %s: %w", name, err)
		}
	}
	if err := mountAll("", []mount{{"/dev/vda", "/root", "ext4", ""}}); err != nil {
		return err
	}
	if err := unix.Chroot("/root"); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := os.Setenv("PATH", "/usr/bin:/bin:/usr/sbin:/sbin"); err != nil {
		return err
	}
	if err := mountAll("", []mount{
		{"devtmpfs", "/dev", "devtmpfs", ""}, {"proc", "/proc", "proc", ""}, {"sysfs", "/sys", "sysfs", ""},
		{"tmpfs", "/dev/shm", "tmpfs", ""}, {"tmpfs", "/run", "tmpfs", ""},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", ""}, {"devpts", "/dev/pts", "devpts", ""},
	}); err != nil {
		return err
	}
	// PID 1 leaves the root group, so that the groups below it may have controllers.
	if err := os.Mkdir("/sys/fs/cgroup/init", 0o755); err != nil {
		return fmt.Errorf("make a control group: %w", err)
	}
	if err := os.WriteFile("/sys/fs/cgroup/init/cgroup.procs", []byte("1"), 0); err != nil {
		return fmt.Errorf("enter a control group: %w", err)
	}
	if err := os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+cpu +memory +pids"), 0); err != nil {
		return fmt.Errorf("enable controllers: %w", err)
	}
	// From here on all that the kernel says is of interest.
	if err := os.WriteFile("/proc/sys/kernel/printk", []byte("8"), 0); err != nil {
		return fmt.Errorf("raise the log level: %w", err)
	}
	// With the first virtual machine and after the last one the kernel patches its
	// scheduler's code, and under an emulator with a thread per processor it can run
	// into its own breakpoint then: one machine stays.
	if err := linux.HoldVM(); err != nil {
		return err
	}
	return loopbackUp()
}

type mount struct{ source, target, kind, data string }

func mountAll(root string, mounts []mount) error {
	for _, m := range mounts {
		if err := os.MkdirAll(root+m.target, 0o755); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
		if err := unix.Mount(m.source, root+m.target, m.kind, 0, m.data); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	return nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring up loopback: %w", err)
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bring up loopback: %w", err)
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring up loopback: %w", err)
	}
	return nil
}

// perform runs one command and reports how it ended. Its error is about the report.
func perform(out io.Writer, c plan.Command) error {
	if _, err := io.WriteString(out, plan.Mark{Name: c.Name}.Line()); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.Argv[0], c.Argv[1:]...)
	cmd.Dir, cmd.Env = c.Dir, append(os.Environ(), c.Env...)
	// A test that hangs tells where when it gets SIGQUIT.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = 10 * time.Second
	w := &lines{out: out}
	cmd.Stdout, cmd.Stderr = w, w
	err := cmd.Run()
	w.flush()
	end := plan.Mark{Name: c.Name, End: true, Took: time.Since(began)}
	if err != nil {
		end.Exit, end.Note = -1, err.Error()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			end.Exit = exit.ExitCode()
		}
	}
	if _, err := io.WriteString(out, end.Line()); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// lines passes whole lines on, so that a mark never stands in the middle of one.
type lines struct {
	out  io.Writer
	rest []byte
}

func (l *lines) Write(p []byte) (int, error) {
	l.rest = append(l.rest, p...)
	if i := bytes.LastIndexByte(l.rest, '\n'); i >= 0 {
		if _, err := l.out.Write(l.rest[:i+1]); err != nil {
			return 0, err
		}
		l.rest = append(l.rest[:0], l.rest[i+1:]...)
	}
	return len(p), nil
}

func (l *lines) flush() {
	if len(l.rest) > 0 {
		_, _ = l.out.Write(append(l.rest, '\n'))
		l.rest = nil
	}
}
