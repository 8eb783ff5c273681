package confine

import (
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

type scope uintptr

const (
	thisThread  scope = 0
	syncThreads scope = unix.SECCOMP_FILTER_FLAG_TSYNC
)

// Offsets in struct seccomp_data, and codes of classic BPF.
const (
	dataCall    = 0
	dataArch    = 4
	dataArgs    = 16
	auditX86_64 = 0xc000003e
	x32Bit      = 0x40000000

	loadWord   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	jumpEqual  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	jumpAtMost = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	andWord    = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	returnWord = unix.BPF_RET | unix.BPF_K
	kill       = unix.SECCOMP_RET_KILL_PROCESS
	allow      = unix.SECCOMP_RET_ALLOW
)

// compile makes the program of a list of rules: what is in none kills.
func compile(rules []rule) []unix.SockFilter {
	p := []unix.SockFilter{
		{Code: loadWord, K: dataArch},
		{Code: jumpEqual, Jt: 1, K: auditX86_64},
		{Code: returnWord, K: kill},
		{Code: loadWord, K: dataCall},
		{Code: jumpAtMost, Jf: 1, K: x32Bit},
		{Code: returnWord, K: kill},
	}
	for _, r := range rules {
		var body []unix.SockFilter
		if len(r.values) > 0 {
			body = append(body, unix.SockFilter{Code: loadWord, K: dataArgs + 8*uint32(r.arg)})
			if r.mask != 0 {
				body = append(body, unix.SockFilter{Code: andWord, K: r.mask})
			}
			for i, v := range r.values {
				// To the "allow" after the values, which a "kill" precedes.
				body = append(body, unix.SockFilter{Code: jumpEqual, Jt: uint8(len(r.values) - i), K: v})
			}
			body = append(body, unix.SockFilter{Code: returnWord, K: kill})
		}
		body = append(body, unix.SockFilter{Code: returnWord, K: allow})
		p = append(p, unix.SockFilter{Code: jumpEqual, Jf: uint8(len(body)), K: r.call})
		p = append(p, body...)
	}
	return append(p, unix.SockFilter{Code: returnWord, K: kill})
}

func install(rules []rule, s scope) error {
	program := compile(rules)
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	// SAFETY: the kernel copies the program during the call; KeepAlive holds it until then.
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, uintptr(s), uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return fmt.Errorf("install system call filter: %w", errno)
	}
	return nil
}

// VCPUThread narrows the filter of the calling thread, which is locked to its goroutine
// and ends with it.
func VCPUThread() error { return install(vcpuRules(), thisThread) }

// All rights that Landlock knew first, for files.
const landlockFileRights = 1<<13 - 1

type landlockAttr struct{ HandledFiles uint64 }

// restrictFiles forbids to open any file, on all threads. It returns why it could not, or "".
func restrictFiles() string {
	attr := landlockAttr{landlockFileRights}
	// SAFETY: attr has the layout of the first version of struct landlock_ruleset_attr and
	// lives until the call returns.
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return "Landlock (this kernel has none)"
	}
	defer unix.Close(int(fd))
	// A thread without no_new_privs may not restrict itself.
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return "Landlock (" + errno.Error() + ")"
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return "Landlock (" + errno.Error() + ")"
	}
	return ""
}
