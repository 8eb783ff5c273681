// Package machine is one virtual machine: it joins vCPUs, memory, buses and devices, and
// is what the control socket acts on.
//
// A machine begins blank ([New]): VM, memory slots, interrupt controllers, vCPUs with
// their CPUID, doorbells and interrupt lines exist, no content does. That is all that
// takes time and depends on nothing but the shape, so that it can be made in advance.
// [Machine.Boot] or [Machine.Restore] give it content, once.
//
// # Threads
//
// Every vCPU has a goroutine locked to a thread, which alone enters the guest; nobody
// touches a vCPU's state unless it is parked. One goroutine, the control loop, calls all
// methods except Kick-like ones of devices; methods are not safe for concurrent use
// unless they say so. To stop a vCPU: set its stop flag, then immediate_exit, then send
// SIGURG to its thread (Go's runtime always has a handler for it). A signal that comes too early is
// made up for by immediate_exit; a vCPU that is just handling an exit sees the flag. A
// stopped vCPU enters KVM once more with immediate_exit set, which completes the I/O
// that was pending without running the guest.
//
// # Capture
//
// The capture rule: the pages, the state of vCPUs and of devices are of one instant, the
// pause. Pages copied while the guest ran are write-protected before they are read, and
// whatever was written since is copied again during the pause.
//
// Written pages are known by three sets. A page is private if it was written since the
// restore. Once tracking is on, the kernel also tells what was written since it was
// last asked. The set since the parent holds what was reported so and is not yet
// part of a stored snapshot: a capture that is never stored loses nothing.
package machine
