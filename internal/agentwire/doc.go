// Package agentwire is the wire protocol between the daemon and forkd-agent:
// a pure codec shared by both sides (docs/format/agent-protocol.md).
//
// The channel is one byte stream (a virtio-console port, or the pipes of a
// user-space kernel) that can lose its peer at any byte. So every frame is
// COBS-encoded and ended by a NUL, which cannot occur inside a frame; it carries
// its own length and a CRC-32C. A NUL therefore aborts a half-sent frame: what
// precedes it fails the length or checksum and is dropped, never executed.
//
// A connection starts with NUL + HELLO(nonce, version), repeated until the same
// nonce comes back; both sides drop every frame before it. Stream 0 carries
// control calls; calls have their own ids, and byte streams (HTTP and port
// forwarding) are opened on further ids with credit-based flow control.
//
// Everything read is checked here: both sides treat the other as hostile.
package agentwire
