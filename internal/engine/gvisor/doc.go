// Package gvisor is the engine that runs sandboxes under gVisor's runsc: a
// user-space kernel instead of a virtual machine, for hosts without usable KVM.
// User code runs at the speed of the host; isolation is `user-kernel`, weaker than
// a VM with hardware support.
//
// Root file system. The image comes as one EROFS file, which the user-space kernel
// opens read-only and reads itself; all children share it in the host's page cache.
// What a sandbox writes is kept in its own memory.
//
// Agent. It is the init process of the sandbox, on a read-only bind mount, and
// speaks over two named pipes in the machine's directory. The sandbox holds both
// ends of each, so they outlive the daemon and the next one opens them by name;
// nothing has to keep them alive. A third pipe carries what init prints.
//
// State. A capture is `runsc checkpoint`: the whole memory, whatever it is forked
// from (there are no differences, and forks share no memory). It holds the agent,
// too, and a description of what it needs (state.json), with a checksum of the
// beginning of each file: runsc itself does not notice damaged pages.
//
// Processes of a machine: runsc-sandbox (the user-space kernel; its end is the
// machine's end), its stubs, which run user code, and runsc-gofer. All are born in
// the machine's control group. runsc's own records lie in <driver>/run; their
// --root and the sandbox id on the command line are how Reap and Orphans find them.
//
// Lock order: Driver.mu, then Machine.mu; no I/O under Driver.mu.
package gvisor
