// Package vmmhost is the daemon's side of forkd-vmm processes: it starts them and speaks
// with them. It holds no policy: who runs where, with which uid and limits, is told.
//
// A process is not trusted: it runs a hostile guest and may have been taken over. All it
// can do is send packets, which package vmmwire bounds and checks; one that breaks the
// protocol, or does not answer in time, ends the connection with an error of class
// errdefs.ErrGuest or the context's, and the caller ends the process.
package vmmhost
