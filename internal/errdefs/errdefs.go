// Package errdefs holds the error classes of forkd.
//
// Every error that leaves a package belongs to one class, found with
// errors.Is(err, errdefs.ErrX). Front ends map classes to status codes, one
// table per front end; nobody looks at message texts. A hint, if any, says what
// the caller can do and is found with [Hint].
package errdefs

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// The classes. Wrap them with %w, or mark an error of another library with [As].
var (
	ErrInvalid           = errors.New("invalid argument")
	ErrNotFound          = errors.New("not found")
	ErrConflict          = errors.New("conflict")
	ErrNotReady          = errors.New("not ready")
	ErrPermission        = errors.New("permission denied")
	ErrUnauthenticated   = errors.New("unauthenticated")
	ErrUnsupported       = errors.New("not supported")
	ErrResourceExhausted = errors.New("resource exhausted")
	ErrUnavailable       = errors.New("unavailable")
	ErrTimeout           = errors.New("timed out")
	ErrCanceled          = errors.New("canceled")
	// ErrCorrupt: stored bytes are damaged. ErrIncompatible: they are whole but
	// made by or for something this build or host is not.
	ErrCorrupt      = errors.New("corrupt")
	ErrIncompatible = errors.New("incompatible")
	// ErrGuest: the guest broke the protocol or ended; the sandbox is to blame.
	ErrGuest    = errors.New("guest failure")
	ErrInternal = errors.New("internal error")
)

var classes = []struct {
	err  error
	code string
}{
	{ErrInvalid, "invalid_argument"},
	{ErrNotFound, "not_found"},
	{ErrConflict, "conflict"},
	{ErrNotReady, "not_ready"},
	{ErrPermission, "permission_denied"},
	{ErrUnauthenticated, "unauthenticated"},
	{ErrUnsupported, "unsupported"},
	{ErrResourceExhausted, "resource_exhausted"},
	{ErrUnavailable, "unavailable"},
	{ErrTimeout, "timeout"},
	{ErrCanceled, "canceled"},
	{ErrCorrupt, "corrupt"},
	{ErrIncompatible, "incompatible"},
	{ErrGuest, "guest_failure"},
	{ErrInternal, "internal"},
}

// Class returns the class of err: one of the Err values of this package, or
// ErrInternal if it belongs to none. Context errors count as ErrTimeout and
// ErrCanceled, a full disk as ErrResourceExhausted. Class(nil) is nil.
func Class(err error) error {
	if err == nil {
		return nil
	}
	for _, c := range classes {
		if errors.Is(err, c.err) {
			return c.err
		}
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return ErrTimeout
	case errors.Is(err, context.Canceled):
		return ErrCanceled
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return ErrResourceExhausted
	}
	return ErrInternal
}

// Code returns the stable machine-readable name of the class of err, as it
// stands in the "code" field of API errors.
func Code(err error) string {
	class := Class(err)
	for _, c := range classes {
		if c.err == class {
			return c.code
		}
	}
	return ""
}

// FromCode returns the class with that machine-readable name, or ErrInternal.
func FromCode(code string) error {
	for _, c := range classes {
		if c.code == code {
			return c.err
		}
	}
	return ErrInternal
}

type classified struct {
	class error
	err   error
}

func (e *classified) Error() string   { return e.err.Error() }
func (e *classified) Unwrap() []error { return []error{e.err, e.class} }

// As gives err a class without changing its text. As(class, nil) is nil.
func As(class, err error) error {
	if err == nil {
		return nil
	}
	return &classified{class: class, err: err}
}

// New returns an error of class with the formatted text; %w works as in fmt.Errorf.
func New(class error, format string, args ...any) error {
	return As(class, fmt.Errorf(format, args...))
}

type hinted struct {
	err  error
	hint string
}

func (e *hinted) Error() string { return e.err.Error() }
func (e *hinted) Unwrap() error { return e.err }

// WithHint attaches what the caller can do about err. WithHint(nil, ...) is nil.
func WithHint(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return &hinted{err: err, hint: fmt.Sprintf(format, args...)}
}

// Hint returns the outermost hint of err, or "".
func Hint(err error) string {
	var h *hinted
	if errors.As(err, &h) {
		return h.hint
	}
	return ""
}
