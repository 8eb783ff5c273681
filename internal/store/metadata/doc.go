// Package metadata is the journal of forkd: what exists, in SQLite, so that a
// daemon killed at any moment finds out on its next start what it had promised.
//
// It stores sandboxes, the state of snapshots, tags, leases and builds. It knows
// no life cycle: states are texts that the layer above gives a meaning. Secrets,
// tokens and environments never enter it.
//
// Ownership: [Open] locks the data directory (flock on <data>/lock) until Close,
// so there is one daemon per directory. The database is <data>/forkd.db.
//
// Writes go through one goroutine that joins concurrent calls into one
// transaction, each call in its own savepoint: a call that fails changes nothing
// and does not disturb the others. A call that returned nil is seen by every later
// read and survives kill -9 of the process. Against power loss, synchronous=NORMAL
// may lose the newest transactions but never splits one; the calls that publish or
// delete a snapshot or move a tag are fsynced before they return, with all that
// was written before them.
//
// A canceled context ends a call only before its write began.
//
// The schema only moves forwards. A newer one is refused with ErrIncompatible.
package metadata
