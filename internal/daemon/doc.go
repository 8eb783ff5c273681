// Package daemon plugs the parts of forkd together: it is the only package that
// knows all of them.
//
// `forkd serve` runs [Serve]: lock the data directory, open the journal and the
// stores, start the engine, adopt what runs, listen. A private daemon is the same
// program, started by `forkd run` and `forkd demo` where none runs: it has no TCP
// port, a socket of its own, and ends together with its sandboxes when its
// standard input ends, so that it cannot outlive the command that wanted it.
//
// The data directory:
//
//	lock, forkd.db     one daemon at a time; the journal
//	forkd.sock         the API
//	images/ kernels/ initramfs/ cache/
//	snapshots/<id>/    manifest and layers
//	sandboxes/<id>/    one machine each, prepared ones too
//	engine/qemu/       the engine's own files
//
// After a crash all of it stays; the next start removes what was half-made.
package daemon
