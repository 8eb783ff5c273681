// Package linux wraps raw Linux facilities as typed functions, without policy.
//
// It is the only package (with the VMM's) where unsafe and raw system calls are
// allowed: unsafe stands in *_unsafe.go files, each use with a SAFETY comment.
// Functions retry EINTR, wrap errors with a class of internal/errdefs, own no
// goroutine that outlives a call and keep no state between calls. Whatever
// returns a descriptor returns an owned *os.File or a type with Close.
//
// A process is never named by its pid alone: see [Process].
package linux
