// Package kvm speaks to /dev/kvm: ioctls as typed methods, no policy.
//
// [System], [VM] and [VCPU] own their descriptors; Close a vCPU before its VM. Every
// ioctl is repeated while it is interrupted: Go's runtime preempts threads by
// signals, and even KVM_CREATE_VM returns EINTR then. Only [VCPU.Run] returns on a
// signal, because that is how it is stopped.
//
// Order matters to the kernel. Memory slots come before the interrupt controllers: a
// slot set up right after them waits milliseconds for a grace period. CPUID comes
// before any other vCPU state.
//
// A vCPU belongs to one goroutine that is locked to its thread; its methods are
// called there, or by others while that goroutine is known to wait.
// [VCPU.RequestExit] alone may be called at any time.
//
// All constants and layouts are compared with the kernel's header by
// TestHeader, which compiles a C program.
package kvm
