package forkd

import (
	"errors"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
)

// The classes of errors; docs/errors.md says what each means.
var (
	ErrInvalid           = errdefs.ErrInvalid
	ErrNotFound          = errdefs.ErrNotFound
	ErrConflict          = errdefs.ErrConflict
	ErrNotReady          = errdefs.ErrNotReady
	ErrPermission        = errdefs.ErrPermission
	ErrUnauthenticated   = errdefs.ErrUnauthenticated
	ErrUnsupported       = errdefs.ErrUnsupported
	ErrResourceExhausted = errdefs.ErrResourceExhausted
	ErrUnavailable       = errdefs.ErrUnavailable
	ErrTimeout           = errdefs.ErrTimeout
	ErrCanceled          = errdefs.ErrCanceled
	ErrCorrupt           = errdefs.ErrCorrupt
	ErrIncompatible      = errdefs.ErrIncompatible
	ErrGuest             = errdefs.ErrGuest
	ErrInternal          = errdefs.ErrInternal
)

// ErrNoDaemon: nothing answers where a daemon was looked for. Such errors are of
// class ErrUnavailable, or ErrPermission if a socket is there but not for us.
var ErrNoDaemon = errors.New("no forkd daemon")

// Error is what the daemon answered instead of a result.
type Error struct {
	Status    int    // of HTTP; 0 if it came inside a stream
	Code      string // name of the class, as in docs/errors.md
	Message   string // what happened, to which object
	Hint      string // what to do about it, or ""
	RequestID string // to look for in the daemon's log
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the class, so that errors.Is works across the wire.
func (e *Error) Unwrap() error { return errdefs.FromCode(e.Code) }

// Hint returns what the caller can do about err, or "".
func Hint(err error) string {
	if hint := errdefs.Hint(err); hint != "" {
		return hint
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Hint
	}
	return ""
}

// streamError turns the error fields of a stream's line into an error, or nil.
func streamError(message, code, hint string) error {
	if message == "" && code == "" {
		return nil
	}
	return &Error{Code: code, Message: message, Hint: hint}
}

// errTruncated tells of a stream that ended before its last line.
func errTruncated(what string) error {
	return errdefs.WithHint(errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("%s: the daemon closed the connection before the end of its answer", what)),
		"look at the daemon's log; forkd ls shows what exists now")
}
