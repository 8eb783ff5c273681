// Package bench measures forkd from the caller's side, through the Go client, and
// writes down what it saw: JSON with names that stay, a table, charts.
//
// What counts as one fork: the clock starts when the request is sent and stops
// when the warm runner of that guest has answered an eval. Plain processes and
// runc containers do the same work on the same machine, in turn with the forks,
// with the very files of the guest's image, so that a ratio compares like with
// like. An answer that is wrong or missing fails the measurement ([ErrAnswers]).
//
// Processor time and memory of the daemon and its machines come from /proc, which
// needs a daemon on this host; without, those figures are null. Other work of the
// same daemon counts as ours: measure on a quiet one.
//
// Everything made on the way (sandboxes, a snapshot of another size, pools, a copy
// of the image's files, containers) is removed at the end, also of a canceled call.
package bench
