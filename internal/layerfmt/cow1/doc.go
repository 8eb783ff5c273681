// Package cow1 reads and writes copy-on-write disk layers, format cow1, and stacks
// them to a disk.
//
// A disk is a chain: a raw image at the bottom, then sealed layers, each what one
// snapshot adds to its parent, and on top the overlay that a running machine writes
// to. For each block of 4096 bytes a layer says data (the bytes are in this file), zero,
// or nothing, which means "see below". A capture seals the overlay, which then is the
// snapshot's layer as it stands, and puts an empty one on top: nothing is copied.
//
// docs/format/cow1.md describes the bytes. The package opens no paths; callers own
// all files.
//
//   - [Layer] is a sealed file. Opening it reads one page; the map of its blocks is read
//     where it is asked for, so a fork of a deep chain reads nothing ahead.
//   - [Overlay] is a file being written. Its map is in memory until Flush.
//   - [Disk] is the chain as a flat range of bytes.
//   - [Merge] writes several layers as one.
//
// # What a crash leaves
//
// After Flush has returned, a process killed at any moment leaves a file from which
// [Recover] reads all that was written before the Flush; with [SyncHost], so does a
// host that loses power. What was written since may be there or not, block by block,
// never mixed up with other blocks. An overlay that was not sealed is no Layer.
//
// None of the types is safe for concurrent use, except that sealed files may be opened
// any number of times.
package cow1
