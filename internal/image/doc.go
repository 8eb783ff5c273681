// Package image builds and keeps images: an immutable root file system on a raw
// ext4 disk, the guest kernel it boots with, and the initramfs that carries our
// agent as /init. The agent is no part of an image, so any root file system
// works, and a new agent needs no new image.
//
// On disk (each directory has one owner, the [Store] of one process; the caller
// holds the lock of the data directory):
//
//	Dir/<image id>/{disk.ext4,image.json}   immutable once there
//	Dir/names.json                          name -> image id
//	KernelDir/<digest>/{vmlinux,modules/NN-name.ko,kernel.json}
//	KernelDir/names.json                    name -> digest, of kernels that users added
//	InitramfsDir/<digest>.cpio              of a kernel and an agent
//	CacheDir/{kernel,apt}/*.deb             may be deleted at any time
//
// Everything is made under a name that starts with a dot, synced and renamed, so
// a crash leaves only such names, and [New] removes them. A name is given after
// its image is published: a crash between leaves the image without name and a
// mark in it, and New gives the name then. Disks are never mounted by the host.
//
// Building runs Debian's own tools. Those that run code of packages get private
// mount and process namespaces, which end with the first process in them: when
// the context is canceled or this process dies, no process or mount is left.
// Those namespaces are for cleanliness, not a boundary: installation scripts of
// Debian packages run as root of this host, as with apt. What is not signed by
// Debian must not be run here but in a sandbox.
//
// Locks: Store.mu guards the index and is never held over I/O or another lock;
// the slots serialise long work (build, then kernel or initramfs).
package image
