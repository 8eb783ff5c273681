//go:build !race

// The children are this program: the race detector's runtime makes system calls of its
// own, which the filters forbid.

package confine

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// forbidden are calls that nobody confined may make; each is tried in a process of its own.
var forbidden = map[string]func(){
	"open a file":      func() { _, _ = unix.Open("/", unix.O_RDONLY, 0) },
	"make a socket":    func() { _, _ = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0) },
	"run a program":    func() { _ = unix.Exec("/bin/true", []string{"true"}, nil) },
	"make a process":   func() { _, _, _ = unix.Syscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0) },
	"fork":             func() { _, _, _ = unix.Syscall(unix.SYS_FORK, 0, 0, 0) },
	"trace":            func() { _ = unix.PtraceAttach(1) },
	"executable pages": func() { _, _ = unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE) },
	"another ioctl":    func() { _, _ = unix.IoctlGetInt(0, unix.TIOCGPGRP) },
	"create a VM":      func() { _, _ = unix.IoctlRetInt(0, 0xae01) },
	"32-bit numbers":   func() { _, _, _ = unix.Syscall(unix.SYS_READ|0x40000000, 0, 0, 0) },
	"kill":             func() { _ = unix.Kill(1, 0) },
	"mount":            func() { _ = unix.Mount("", "/", "tmpfs", 0, "") },
}

// forbiddenOnVCPU are calls that only threads without a guest may make.
var forbiddenOnVCPU = map[string]func(){
	"receive":          func() { _, _, _, _, _ = unix.Recvmsg(0, nil, nil, 0) },
	"accept":           func() { _, _, _ = unix.Accept4(0, 0) },
	"read VM state":    func() { _, _ = unix.IoctlRetInt(0, 0x8090ae81) },
	"make descriptors": func() { _, _ = unix.Eventfd(0, 0) },
	"end a file":       func() { _ = unix.Ftruncate(0, 0) },
}

const (
	tryEnv  = "FORKD_CONFINE_TEST"
	onVCPU  = "vcpu:"
	allowed = "allowed"
	lived   = 42
)

func TestMain(m *testing.M) {
	name := os.Getenv(tryEnv)
	if name == "" {
		os.Exit(m.Run())
	}
	if _, err := Rights(Config{}); err != nil {
		panic(err)
	}
	if _, err := Filter(); err != nil {
		panic(err)
	}
	try, thread := forbidden[name], false
	if try == nil {
		try, thread = forbiddenOnVCPU[name[len(onVCPU):]], true
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if thread {
			if err := VCPUThread(); err != nil {
				panic(err)
			}
		}
		if try != nil {
			try()
		}
	}()
	<-done
	os.Exit(lived)
}

func attempt(name string) error {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), tryEnv+"="+name)
	return cmd.Run()
}

func killed(err error) bool {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGSYS
}

func TestForbiddenCallsKill(t *testing.T) {
	for name := range forbidden {
		if err := attempt(name); !killed(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name := range forbiddenOnVCPU {
		if err := attempt(onVCPU + name); !killed(err) {
			t.Errorf("%s on a vCPU thread: %v", name, err)
		}
	}
}

// TestAllowedProcessLives: without a forbidden call, a confined process goes on, on both
// kinds of threads.
func TestAllowedProcessLives(t *testing.T) {
	var exit *exec.ExitError
	if err := attempt(onVCPU + allowed); !errors.As(err, &exit) || exit.ExitCode() != lived {
		t.Errorf("%v", err)
	}
}
