// Package control serves the control socket of one VMM process: it decodes requests of
// package vmmwire, acts on the machine, and answers.
//
// The goroutine that reads a connection also acts on it, under one lock: handing a request
// to another goroutine would cost a thread switch on the path of every fork. A new
// connection replaces the one before. Descriptors that came with a request are closed
// after it, unless a device keeps them.
//
// A client is trusted to own the machine, not to be correct: whatever it sends is
// answered or ends its connection, never the process.
package control
