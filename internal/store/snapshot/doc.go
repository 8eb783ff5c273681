// Package snapshot stores captured machines: <dir>/<id>/manifest.json beside the
// artifact files it lists. docs/format/snapshot.md describes the directory.
//
// A snapshot is made in a staging directory ([Store.Stage]), then published in one
// rename ([Staging.Publish]). Once published it never changes; it goes as a whole
// ([Store.Remove]). A snapshot may have a parent, whose artifacts it needs; a
// parent is not removed before its dependents, nor anything that is leased.
//
// What a crash leaves: names that begin with a dot (staging and trash), which
// [Open] deletes, and complete snapshots. Every file and directory is synced before
// the rename that makes it visible; trash is emptied only after the rename to it
// is synced. So a snapshot is either complete or not listed, at any kill -9 and any
// loss of power. Config.Failpoint sees every durable step, for the test of this.
//
// One process may use a directory at a time (the journal's lock). Leases live in
// memory: after a restart their holders take them again.
//
// Digests are computed once, in Publish; only [Store.Verify] reads them again. A
// snapshot whose manifest cannot be read is not listed but kept, as [Store.Broken]
// says, and still protects its parent.
//
// Locks: Staging.mu before Store.mu. Neither is held during file operations; ids
// in the middle of one are reserved in Store.busy.
package snapshot
