// Package qemu is the engine that runs sandboxes under stock QEMU.
//
// It works everywhere, without hardware virtualization: machines are `microvm`
// under TCG, their isolation is `vm-emulated`, and because QEMU's own policy does
// not call TCG a security boundary, the boundary is the confinement of the
// process (see launch.go): its own uid, an empty root, no_new_privs, seccomp, no
// network, limits.
//
// Memory. Every machine maps one sealed memfd privately: for a boot an empty one,
// for a fork the *resident image* of its snapshot, all layers merged (internal/engine/memimage).
// A capture stores the pages that are no longer those of that file. Nobody can
// write a sealed file, so an escaped guest cannot change its siblings.
//
// Disk. The image's raw file and the snapshots' qcow2 layers are opened read-only
// below a qcow2 overlay that belongs to the machine alone.
//
// Control. QMP and the agent's port are listening unix sockets in the machine's
// directory, bound by us and passed as descriptors; they outlive the daemon, and
// machine.json there tells the next daemon what to adopt. The process carries
// forkd-<installation>-<id> as its -name, which is how Reap and Orphans find it.
//
// Lock order: Driver.mu, then Machine.mu; no I/O under Driver.mu.
package qemu
