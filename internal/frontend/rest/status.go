package rest

import (
	"net/http"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// StatusClientClosed answers a request whose client went away first; only logs
// and idempotent repeats see it.
const StatusClientClosed = 499

// statusOf is the table from error class to status, docs/errors.md. What the
// feature set of this build cannot honour is the caller's to change, so
// unsupported is 400 and not 501, which clients repeat.
func statusOf(err error) int {
	switch errdefs.Class(err) {
	case errdefs.ErrInvalid, errdefs.ErrUnsupported:
		return http.StatusBadRequest
	case errdefs.ErrUnauthenticated:
		return http.StatusUnauthorized
	case errdefs.ErrPermission:
		return http.StatusForbidden
	case errdefs.ErrNotFound:
		return http.StatusNotFound
	case errdefs.ErrConflict, errdefs.ErrNotReady, errdefs.ErrIncompatible:
		return http.StatusConflict
	case errdefs.ErrCanceled:
		return StatusClientClosed
	case errdefs.ErrGuest:
		return http.StatusBadGateway
	case errdefs.ErrResourceExhausted, errdefs.ErrUnavailable:
		return http.StatusServiceUnavailable
	case errdefs.ErrTimeout:
		return http.StatusGatewayTimeout
	}
	return http.StatusInternalServerError // corrupt and internal
}

// retryAfter is the Retry-After of a full host, in seconds: sandboxes come and go
// within that time.
const retryAfter = "2"

// httpError is a refusal that HTTP itself has a status for, before any class
// applies: unknown route, wrong method, wrong or too large body.
type httpError struct {
	status int
	err    error
}

func (e *httpError) Error() string { return e.err.Error() }
func (e *httpError) Unwrap() error { return e.err }

// refuse returns an error of class invalid with a status of its own.
func refuse(status int, format string, args ...any) error {
	return &httpError{status: status, err: errdefs.New(errdefs.ErrInvalid, format, args...)}
}

// body turns err into what the client sees of it.
func body(err error) api.Error {
	return api.Error{Error: err.Error(), Code: errdefs.Code(err), Hint: errdefs.Hint(err)}
}
