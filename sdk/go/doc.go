// Package forkd is the Go client of forkd: real Linux virtual machines that can
// be forked copy-on-write.
//
//	c, err := forkd.New(forkd.Options{})
//	res, err := c.Fork(ctx, forkd.ForkRequest{SnapshotTag: "py-base", N: forkd.Int(10)}, nil)
//	out, err := c.Eval(ctx, res.Sandboxes[0].ID, forkd.EvalRequest{Code: "import sys; sys.version"})
//
// A [Client] may be used by many goroutines at once. Ending a call's context
// closes its request; the daemon then undoes what the call had begun. Errors of
// the daemon are of type [*Error] and match this package's Err values, so
// errors.Is(err, forkd.ErrNotFound) holds across the wire.
package forkd
