package confine

import "golang.org/x/sys/unix"

// rule allows a system call, always or if one of its arguments has one of the values
// (mask 0: all bits count, else only those).
type rule struct {
	call   uint32
	arg    int
	mask   uint32
	values []uint32
}

func always(calls ...uint32) (out []rule) {
	for _, c := range calls {
		out = append(out, rule{call: c})
	}
	return out
}

// Requests that devices and the machine make after the start, beside KVM_RUN.
const (
	kvmRun        = 0xae80
	prSetVMA      = 0x53564d41 // Go names its mappings
	cloneThread   = unix.CLONE_THREAD
	wordArgument0 = 0
	wordArgument1 = 1
	wordArgument2 = 2
)

// stateRequests are the ioctls of save and restore, of the page map and of userfaultfd;
// package kvm and package memory define them.
var stateRequests = []uint32{
	0x8090ae81, 0x4090ae82, 0x8138ae83, 0x4138ae84, 0xc008ae88, 0x4008ae89, // regs, sregs, MSRs
	0x8400ae8e, 0x4400ae8f, 0x4008ae90, 0x8004ae98, 0x4004ae99, // local APIC, CPUID, MP state
	0x8040ae9f, 0x4040aea0, 0x8080aea1, 0x4080aea2, 0xaea2, 0xaea3, // events, debug registers, TSC rate
	0x9000aea4, 0x5000aea5, 0x9000aecf, 0x8188aea6, 0x4188aea7, 0xaead, // XSAVE, XCRS, clock
	0x4030ae7b, 0x8030ae7c, 0xc208ae62, 0x8208ae63, 0x4008ae61, // VM clock, interrupt controllers, lines
	0xc0606610, 0xc018aa3f, 0xc020aa00, // page map, userfaultfd
}

// runtimeRules are what Go's runtime needs on any thread.
func runtimeRules() []rule {
	r := always(unix.SYS_READ, unix.SYS_WRITE, unix.SYS_FUTEX, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME,
		unix.SYS_SCHED_YIELD, unix.SYS_EPOLL_PWAIT, unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_GETPID, unix.SYS_GETTID,
		unix.SYS_TGKILL, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK,
		unix.SYS_RESTART_SYSCALL, unix.SYS_EXIT, unix.SYS_EXIT_GROUP)
	return append(r,
		rule{call: unix.SYS_MMAP, arg: wordArgument2, mask: unix.PROT_EXEC, values: []uint32{0}},
		rule{call: unix.SYS_PRCTL, arg: wordArgument0, values: []uint32{prSetVMA}})
}

// processRules are those of all threads.
func processRules() []rule {
	r := []rule{{call: unix.SYS_IOCTL, arg: wordArgument1, values: append([]uint32{kvmRun}, stateRequests...)}}
	r = append(r, runtimeRules()...)
	r = append(r, always(unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_PREADV, unix.SYS_PWRITEV, unix.SYS_READV, unix.SYS_WRITEV,
		unix.SYS_POLL, unix.SYS_RECVMSG, unix.SYS_SENDMSG, unix.SYS_ACCEPT4, unix.SYS_SHUTDOWN, unix.SYS_CLOSE, unix.SYS_FCNTL, unix.SYS_LSEEK,
		unix.SYS_FSTAT, unix.SYS_FTRUNCATE, unix.SYS_FALLOCATE, unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_EVENTFD2,
		unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_CREATE1, unix.SYS_PPOLL, unix.SYS_GETRANDOM, unix.SYS_SCHED_GETAFFINITY, unix.SYS_USERFAULTFD,
		unix.SYS_GETRUSAGE, unix.SYS_SECCOMP)...)
	return append(r,
		rule{call: unix.SYS_MPROTECT, arg: wordArgument2, mask: unix.PROT_EXEC, values: []uint32{0}},
		// Threads, never processes.
		rule{call: unix.SYS_CLONE, arg: wordArgument0, mask: cloneThread, values: []uint32{cloneThread}})
}

// vcpuRules are those of a thread that runs a guest: enter it, ring a bell, write a line.
func vcpuRules() []rule {
	r := []rule{{call: unix.SYS_IOCTL, arg: wordArgument1, values: []uint32{kvmRun}}}
	// Devices that answer on this thread use descriptors that they have; the local
	// interrupt line of the serial port is an ioctl.
	r[0].values = append(r[0].values, 0x4008ae61)
	r = append(r, runtimeRules()...)
	return append(r, always(unix.SYS_PREAD64, unix.SYS_PWRITE64, unix.SYS_PREADV, unix.SYS_PWRITEV, unix.SYS_FDATASYNC, unix.SYS_FALLOCATE,
		unix.SYS_GETRANDOM, unix.SYS_EPOLL_CTL)...)
}
