package rest

import (
	"encoding/json"
	"mime"
	"net/http"
	"strings"
	"sync"
	"time"

	api "forkd.dev/forkd/api/rest"
)

// wantsStream tells whether the client accepts an answer line by line.
func wantsStream(r *http.Request) bool {
	for _, part := range strings.Split(r.Header.Get("Accept"), ",") {
		if media, _, err := mime.ParseMediaType(part); err == nil && media == api.NDJSON {
			return true
		}
	}
	return false
}

// lineDeadline bounds the sending of one line, so that a client that stopped
// reading cannot hold up the work it is told about.
const lineDeadline = 30 * time.Second

// stream writes an NDJSON answer. Nothing is sent before the first line, so an
// error that comes before it can still have its own status.
type stream struct {
	w http.ResponseWriter

	// mu orders lines of concurrent callbacks, so it is held while one is sent.
	mu sync.Mutex
	// +checklocks:mu
	begun bool
}

// line sends v at once. A failed write means that the client is gone; the
// request's context says so to who works for it.
func (s *stream) line(v any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.begun {
		s.begun = true
		s.w.Header().Set("Content-Type", api.NDJSON)
		s.w.Header().Set("X-Content-Type-Options", "nosniff")
		s.w.WriteHeader(http.StatusOK)
	}
	control := http.NewResponseController(s.w)
	_ = control.SetWriteDeadline(time.Now().Add(lineDeadline))
	enc := json.NewEncoder(s.w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v)
	_ = control.Flush()
	// The connection serves other requests later: the deadline must not outlive the line.
	_ = control.SetWriteDeadline(time.Time{})
}

// started tells whether a line was sent.
func (s *stream) started() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.begun
}
