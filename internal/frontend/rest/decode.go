package rest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"net/http"
	"strconv"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// Limits of request bodies.
const (
	defaultBody = 2 << 20
	execBody    = 32 << 20 // holds stdin
	evalBody    = 8 << 20
	forkBody    = 32 << 20 // holds files of children
)

// decode reads the whole body of r as one JSON object into v. The body must be
// declared as JSON: that keeps browsers from sending it across origins unasked.
func decode(r *http.Request, v any) error {
	media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || media != api.JSON {
		return errdefs.WithHint(refuse(http.StatusUnsupportedMediaType, "Content-Type is %.80q, want %s", r.Header.Get("Content-Type"), api.JSON),
			"send the header Content-Type: %s", api.JSON)
	}
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return readError(err)
	}
	return unmarshal(raw, v)
}

// readError classifies a failure to read a body.
func readError(err error) error {
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return refuse(http.StatusRequestEntityTooLarge, "request body is larger than %d bytes", large.Limit)
	}
	return errdefs.As(errdefs.ErrCanceled, fmt.Errorf("read request body: %w", err))
}

// unmarshal decodes raw into v: bad syntax is 400, a value of the wrong type 422.
func unmarshal(raw []byte, v any) error {
	err := json.Unmarshal(raw, v)
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil && isObject(raw):
		return nil
	case err == nil:
		return refuse(http.StatusUnprocessableEntity, "request body is not a JSON object")
	case errors.As(err, &wrong) && wrong.Field != "":
		return refuse(http.StatusUnprocessableEntity, "field %.80q of the request cannot be a %.80s, want %s", wrong.Field, wrong.Value, wrong.Type)
	case errors.As(err, &wrong):
		return refuse(http.StatusUnprocessableEntity, "request body is a JSON %.80s, want an object", wrong.Value)
	case json.Valid(raw):
		return refuse(http.StatusUnprocessableEntity, "request body: %w", err)
	}
	return refuse(http.StatusBadRequest, "request body is not JSON: %w", err)
}

func isObject(raw []byte) bool {
	for _, c := range raw {
		switch c {
		case ' ', '\t', '\r', '\n':
			continue
		}
		return c == '{'
	}
	return false
}

// missing says that a required field is absent.
func missing(field string) error {
	return refuse(http.StatusUnprocessableEntity, "field %q is missing", field)
}

// reference returns the {ref} of the path, checked.
func reference(r *http.Request) (string, error) {
	ref := r.PathValue("ref")
	return ref, ident.CheckRef(ref)
}

// flag reads a boolean query parameter; absent is false.
func flag(r *http.Request, name string) (bool, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return false, nil
	}
	v, err := strconv.ParseBool(text)
	if err != nil {
		return false, errdefs.New(errdefs.ErrInvalid, "query parameter %s is %.80q, want true or false", name, text)
	}
	return v, nil
}

// timeout turns timeout_secs into a duration within the agent's limits.
func timeout(secs *float64) (time.Duration, error) {
	if secs == nil {
		return agentwire.DefaultExecTimeout, nil
	}
	limit := agentwire.MaxExecTimeout.Seconds()
	if math.IsNaN(*secs) || *secs <= 0 || *secs > limit {
		return 0, errdefs.New(errdefs.ErrInvalid, "timeout_secs is %g, want more than 0 and at most %g", *secs, limit)
	}
	return max(time.Duration(*secs*float64(time.Second)), time.Millisecond), nil
}

// outputLimit checks output_limit; 0 stands for the agent's default.
func outputLimit(n int) error {
	if n < 0 || n > agentwire.MaxOutputLimit {
		return errdefs.New(errdefs.ErrInvalid, "output_limit is %d, want 0 to %d bytes", n, agentwire.MaxOutputLimit)
	}
	return nil
}
