// Package e2e proves forkd's promises on real virtual machines: the built program
// as a subprocess, its command line, its REST API, the Go client and the Python
// package that upstream published.
//
// The first test that asks for it builds the program from this tree and starts
// one daemon in a data directory of its own; the image and py-base are made once
// for the whole package. Tests share the daemon, so none runs in parallel, and
// each ends the sandboxes it made. Those that stop or kill the daemon start it
// again on the same directory. When all are over, nothing may be left of it:
// process, control group, socket, mount, temporary file.
//
// It needs root, because most of the confinement of a machine's process does.
//
//	go test ./test/e2e                       everything, a few minutes
//	go test ./test/e2e -run Isolation -forkd bin/forkd -data /var/tmp/e2e
//	                                         one test, a given program, keeping the data directory
package e2e
