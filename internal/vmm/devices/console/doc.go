// Package console is a virtio-console device whose ports are byte streams by name; one of
// them is the channel between daemon and guest agent.
//
// The host's end of a port is a non-blocking descriptor given to [Device.Connect]. Bytes go
// straight between it and guest memory and are kept nowhere else:
//
//   - to the guest: read from the descriptor only when the guest has opened the port and
//     given a buffer; so a slow guest stops the writer on the host;
//   - from the guest: what the descriptor does not take stays in the queue, with the number of
//     bytes it took of the first request as state; so a slow reader stops the guest.
//
// So no byte is lost or doubled by a pause, a capture or a new connection, and a guest
// that floods the port costs no memory. A port that has no connection keeps what the guest
// wrote for the next one. The guest is told whenever a port gets or loses its connection; one that replaces
// another at once is not told.
//
// # Goroutines
//
// Each connection has two, which wait until the descriptor can be read or written and end when it is
// closed. [Device.Close] waits for them.
//
// # Locking
//
// Port state belongs to the lock of the Transport. Device.mu guards only which connection a port has; it is
// taken inside of the Transport's lock and nothing is done under it.
package console
