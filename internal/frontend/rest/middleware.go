package rest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"net/http"
	"regexp"
	"runtime/debug"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// recorder remembers what was answered.
type recorder struct {
	http.ResponseWriter
	status int
	bytes  int64
}

func (w *recorder) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	return n, err
}

// Unwrap lets http.ResponseController reach Flush of the real writer.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

type requestIDKey struct{}

func requestID(ctx context.Context) string {
	id, _ := ctx.Value(requestIDKey{}).(string)
	return id
}

// observe gives each request an id, logs its end and turns a panic into a 500
// that shows the client nothing of the stack.
func (s *server) observe(next http.Handler) http.Handler {
	wellFormed := regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(api.RequestID)
		if !wellFormed.MatchString(id) {
			id = newRequestID()
		}
		w.Header().Set(api.RequestID, id)
		r = r.WithContext(context.WithValue(r.Context(), requestIDKey{}, id))
		rec := &recorder{ResponseWriter: w}
		start := time.Now()
		defer func() {
			s.recovered(rec, r, recover())
			s.log.LogAttrs(r.Context(), slog.LevelInfo, "request", slog.String("id", id), slog.String("method", r.Method),
				slog.String("path", r.URL.Path), slog.Int("status", rec.status), slog.Int64("bytes", rec.bytes),
				slog.Duration("duration", time.Since(start)))
		}()
		next.ServeHTTP(rec, r)
	})
}

// recovered handles the value of a panic, nil meaning there was none. If the
// answer has begun, the only honest sign left is to break the connection.
func (s *server) recovered(rec *recorder, r *http.Request, cause any) {
	if cause == nil {
		return
	}
	if cause == http.ErrAbortHandler {
		panic(cause)
	}
	s.log.LogAttrs(r.Context(), slog.LevelError, "panic in request", slog.String("id", requestID(r.Context())),
		slog.Any("cause", cause), slog.String("stack", string(debug.Stack())))
	if rec.status != 0 {
		panic(http.ErrAbortHandler)
	}
	fail(rec, errdefs.WithHint(errdefs.New(errdefs.ErrInternal, "internal error in request %s", requestID(r.Context())),
		"look for this request id in the daemon's log"))
}

func newRequestID() string {
	var b [8]byte
	rand.Read(b[:]) // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}

// guard refuses who may not ask.
func (s *server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.access.check(r); err != nil {
			fail(w, err)
			return
		}
		next.ServeHTTP(w, r)
	})
}
