// Package pack reads and writes packs: one file that holds a snapshot with all its
// ancestors, its image and its kernel. docs/format/pack.md describes it.
//
// A pack is a tar archive in a zstd stream. The first entry is the manifest; it lists
// all others in their order with size, digest, and which parts of each hold data, so
// holes cost nothing. A reader knows the whole of it, and can refuse it, before it
// has written anything.
//
// What is read is taken to be hostile: every number is checked against the manifest,
// the manifest against the limits of the caller, and the stream may not have a byte
// more than it declares. Names are plain relative names; there are no links,
// directories or modes. The package touches no file system: its callers give it
// readers and targets.
package pack
