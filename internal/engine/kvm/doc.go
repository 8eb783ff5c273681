// Package kvm is the engine that runs sandboxes under our own virtual machine monitor,
// forkd-vmm, on hosts whose /dev/kvm runs guest kernels (internal/vmm is the monitor
// itself, internal/vmmwire the protocol between the two).
//
// Processes. Every machine is one forkd-vmm process: own uid, empty root, no network,
// seccomp, limits, and no descriptor but those it was given. *Blank* processes, with
// virtual processors and interrupt controllers made, wait for the shapes used last
// (blank.go), so that a restore only passes descriptors.
//
// Memory. The root of a chain is one sealed memory file (internal/engine/memimage); the
// layers above it are mapped straight from their files in the store, which are open for
// reading only. A chain in more pieces than a machine can map is merged into a memory
// file first. The monitor maps privately: nobody can change what others see.
//
// Disk. The image's raw file and sealed cow1 layers below an overlay that belongs to
// the machine alone. A capture seals the overlay, which is the snapshot's layer as it
// stands, and the source goes on with an empty one.
//
// Control. The control socket and the agent's are listening unix sockets in the
// machine's directory, bound by us and passed as descriptors; they outlive the daemon,
// and machine.json there tells the next daemon what to adopt. A process that was
// started for a machine carries forkd-<installation>-<id> as its name; one that was
// blank carries forkd-<installation>-blank-<token>, and the link <token> in the driver's
// directory names the machine that it became.
//
// Lock order: Driver.mu, then Machine.mu; no I/O under either.
package kvm
