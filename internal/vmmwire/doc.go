// Package vmmwire is the control protocol between the daemon and one forkd-vmm
// process: a pure codec, shared by both sides.
//
// The transport is a listening unix socket of type SOCK_SEQPACKET that the daemon
// creates and passes to the process as a descriptor, so that any later daemon can
// connect again. One message is one packet of at most [MaxMessage] bytes and
// [MaxFiles] descriptors (SCM_RIGHTS); there is no stream to resynchronise, and a
// packet that does not decode ends the connection, never a process.
//
// The VMM speaks first: [Hello]. Then the client sends one request at a time
// ([Boot], [Restore], [Simple], [CaptureBegin], [CaptureEnd], [Rollback]) and gets exactly one reply
// with the same sequence number: [Done], [Captured], [Stats] or [Failed]. Between replies
// the VMM may send [Ended] once, the reason of the machine's end. A new connection
// replaces an older one.
//
// A packet is the kind (1 byte), 3 zero bytes, the sequence number (4 bytes) and a
// body of fields. A field is a key, uvarint(tag<<1 | kind), and a value: kind 0 is
// one uvarint, kind 1 a length and that many bytes. Unknown tags are skipped,
// fields of zero value are left out. Where a message refers to a descriptor it
// gives its position among those of its packet.
//
// Neither side trusts the other: all counts and lengths are bounded while
// decoding, and a decoded message has been checked as far as it can be without
// its descriptors.
package vmmwire
