package rest

import (
	"encoding/json"
	"errors"
	"net/http"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// respond writes v as the JSON answer with status.
func respond(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", api.JSON)
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	// A failed write means that the client is gone: nobody is left to tell.
	_ = enc.Encode(v)
}

// fail writes err as the answer, with the status of its class.
func fail(w http.ResponseWriter, err error) {
	status := statusOf(err)
	var he *httpError
	if errors.As(err, &he) {
		status = he.status
	}
	switch {
	case errors.Is(err, errdefs.ErrResourceExhausted):
		w.Header().Set("Retry-After", retryAfter)
	case status == http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	respond(w, status, body(err))
}
