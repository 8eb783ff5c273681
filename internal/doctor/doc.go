// Package doctor says what this host can do for forkd and what stands in the way.
//
// [Gather] looks at the host and never fails: what it could not find out is part of
// the [Facts]. [Run] judges facts, engine probes and the daemon's answers; it looks
// at nothing itself, so every verdict is tested without the host that earns it.
// The report's JSON is an interface: see [Report].
package doctor
