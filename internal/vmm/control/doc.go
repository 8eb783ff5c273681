// Package control serves the control socket of one VMM process: it decodes requests of
// package vmmwire, acts on the machine, and answers.
//
// One goroutine waits for the listener, the connection and the machine's end, and acts on
// what comes: handing a request to another would cost a thread switch on the path of every
// fork, and memory for each thread. A new connection replaces the one before; while a
// request is carried out, a new client waits. Descriptors that came with a request are
// closed after it, unless a device keeps them.
//
// A client is trusted to own the machine, not to be correct: whatever it sends is
// answered or ends its connection, never the process.
package control
