// Package layerfmt reads and writes memory layers, format forkd-layer-1.
//
// A layer holds the memory pages a snapshot adds to its parent. It is divided
// into units of 4096 bytes. For each unit it says one of three things: data (the
// bytes are in this file), zero, or nothing, which means "see the parent". In a
// layer without a parent, nothing means zero. Holes in the file mean nothing.
//
// docs/format/layer.md describes the bytes. The package is a pure codec: it opens
// no paths, starts no goroutines and does not fsync; the caller owns all files.
//
// A [Reader] checks the header and the whole extent table in Open, so that
// nothing after it can point outside of the file. Data checksums are computed
// while writing and looked at only by [Reader.Verify]: a fork never hashes.
// [Plan] joins a chain of layers into one list of ranges.
//
// Damage is told apart by [ErrMagic], [ErrSize] and [ErrChecksum], all of class
// errdefs.ErrCorrupt; [ErrVersion] is of class errdefs.ErrIncompatible.
package layerfmt
