// Package fake is an engine whose machines are scripted guests in this process.
//
// It implements the whole contract of package engine, so that everything above
// it can be tested without a VM, on any host and with faults at every step. A guest
// has memory, a disk, an identity and a clock; captures write real files (the
// memory in layer format forkd-layer-1, so that the snapshot store checks it), and
// restores read nothing else.
//
// Machines live in a [Registry], which stands for the host: like processes, they
// outlive the driver that started them and can be adopted by another.
//
// Faults are scripted in [Config]: Fault is called at each step of the driver,
// Guest says how a guest misbehaves. Both are called without locks held, so they
// may block.
//
// Lock order: Driver.mu, Registry.mu, process.mu. The op turn of a process is
// taken before any of them.
package fake
