// Package agent is the guest side of the agent channel: it answers the daemon's
// calls inside a sandbox, starts programs, keeps warm language runners and makes
// a fork unique (DESIGN 6).
//
// An [Agent] owns one byte stream ([Channel]) for its whole life; the peer on it
// may come and go. Each HELLO makes a new session and drops all that was queued
// for the old one, but not the state of the agent: a prepared capture, a runner
// and running programs survive. The agent waits by poll and has no timers of its
// own while nothing runs, so an idle guest uses no CPU.
//
// It runs as root beside hostile programs of the same guest and trusts none of
// their bytes: output is bounded, runner answers are checked. What it tells the
// daemon is a claim in any case.
//
// Nothing here imports reflection-heavy packages on the path of hello, ping,
// exec and eval: their first use costs tens of milliseconds in an emulated guest.
// net/http starts on the first "http" stream.
//
// What a fork does before its first answer is kept to little code: in an emulated
// guest every piece of code that runs for the first time, in the kernel as well,
// costs time and memory of the host. So files stay open, facts are looked up while
// processes are frozen for a capture, and calls run on a stack that has grown.
//
// Lock order: capture.turn, runner.turn, then any of the small locks (session.mu,
// processes.mu, groups.mu, gate.mu, identity.mu), which are never held together.
package agent
