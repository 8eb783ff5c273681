// Package vmstate reads and writes the state file of a machine: everything but its
// memory and disks, at the instant of a capture. Format forkd-vmstate-1.
//
// The file is a header of 32 bytes, a table of sections, and the sections, each at a
// multiple of 16 bytes. All numbers are little-endian.
//
//	header   magic "FORKDVMS", version (4 bytes), number of sections (4),
//	         length of the file (8), CRC-32C of all that follows (4), zero (4)
//	entry    kind (4), index (4), offset (8), length (8)
//
// Sections hold structs of linux/kvm.h as the kernel gave them, so that a restore hands
// them back without looking into them, and the state of devices as they wrote it. The
// table is in ascending order of kind and index, sections lie in the order of the table.
//
// The package is a pure codec. [Decode] checks everything that does not need a kernel or
// a device, refuses trailing bytes, and never allocates more than a small multiple of
// its input; what it returns shares memory with the input. Damage is of class
// errdefs.ErrCorrupt, another version of errdefs.ErrIncompatible.
package vmstate
