package rest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"maps"
	"net/http"
	"sync"
	"time"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// Bounds of what is remembered for repeats.
const (
	replayAge     = 24 * time.Hour
	replayEntries = 1024
	replayBytes   = 64 << 20 // of all answers together
	maxKeyLen     = 255
)

// replays remembers the answers of successful creates by Idempotency-Key, so that
// a repeat of the same request gets the same answer and creates nothing. A repeat
// that comes while the first still works waits for it. Failures are forgotten: a
// repeat tries again. The memory does not outlive the daemon.
type replays struct {
	now func() time.Time

	mu sync.Mutex
	// +checklocks:mu
	entries map[string]*replay
	// order lists finished keys, oldest first.
	// +checklocks:mu
	order []string
	// +checklocks:mu
	size int
}

// replay is one remembered request. What follows done is set before it is closed
// and never changes after.
type replay struct {
	fingerprint [sha256.Size]byte
	done        chan struct{}
	kept        bool
	at          time.Time
	status      int
	header      http.Header
	body        []byte
}

func newReplays(now func() time.Time) *replays {
	return &replays{now: now, entries: map[string]*replay{}}
}

// wrap makes a create handler repeatable.
func (p *replays) wrap(next handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		key := r.Header.Get(api.IdempotencyKey)
		if key == "" {
			return next(w, r)
		}
		if len(key) > maxKeyLen {
			return errdefs.New(errdefs.ErrInvalid, "%s has %d bytes, more than %d", api.IdempotencyKey, len(key), maxKeyLen)
		}
		raw, err := io.ReadAll(r.Body)
		if err != nil {
			return readError(err)
		}
		r.Body = io.NopCloser(bytes.NewReader(raw))
		print := fingerprint(r, raw)
		for {
			e, mine := p.claim(key, print)
			if mine {
				return p.run(key, e, next, w, r)
			}
			if e.fingerprint != print {
				return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "%s was used for a different request", api.IdempotencyKey),
					"use a new key for each request that is not a repeat")
			}
			if err := wait(r.Context(), e.done); err != nil {
				return err
			}
			if e.kept {
				e.replay(w)
				return nil
			}
		}
	}
}

// fingerprint tells requests apart: what is asked and in which form the answer goes.
func fingerprint(r *http.Request, raw []byte) [sha256.Size]byte {
	h := sha256.New()
	form := "whole"
	if wantsStream(r) {
		form = "stream"
	}
	h.Write([]byte(r.Method + "\x00" + r.URL.Path + "\x00" + form + "\x00")) // a hash never fails
	h.Write(raw)
	return [sha256.Size]byte(h.Sum(nil))
}

func wait(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// claim returns the entry of key, and whether it is a new one that the caller
// must run.
func (p *replays) claim(key string, print [sha256.Size]byte) (*replay, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked()
	if e, ok := p.entries[key]; ok {
		return e, false
	}
	e := &replay{fingerprint: print, done: make(chan struct{})}
	p.entries[key] = e
	return e, true
}

// run answers the request and settles its entry, whatever happens.
func (p *replays) run(key string, e *replay, next handler, w http.ResponseWriter, r *http.Request) error {
	c := &capture{ResponseWriter: w}
	err := errdefs.New(errdefs.ErrInternal, "request ended early") // stands if next panics
	defer func() { p.settle(key, e, c, err == nil && !c.failed) }()
	err = next(c, r)
	return err
}

func (p *replays) settle(key string, e *replay, c *capture, good bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer close(e.done)
	if !good || c.status/100 != 2 || c.overflow {
		delete(p.entries, key)
		return
	}
	e.kept, e.at, e.status, e.body = true, p.now(), c.status, c.buf.Bytes()
	e.header = http.Header{"Content-Type": c.Header().Values("Content-Type")}
	p.order = append(p.order, key)
	p.size += len(e.body)
	p.expireLocked()
}

// expireLocked drops the oldest finished entries until all bounds hold.
func (p *replays) expireLocked() {
	for len(p.order) > 0 {
		oldest := p.entries[p.order[0]]
		if len(p.order) <= replayEntries && p.size <= replayBytes && p.now().Sub(oldest.at) < replayAge {
			return
		}
		p.size -= len(oldest.body)
		delete(p.entries, p.order[0])
		p.order = p.order[1:]
	}
}

func (e *replay) replay(w http.ResponseWriter) {
	maps.Copy(w.Header(), e.header)
	w.Header().Set("Idempotent-Replayed", "true")
	w.WriteHeader(e.status)
	_, _ = w.Write(e.body) // a failed write means that the client is gone
}

// capture copies an answer while it is sent.
type capture struct {
	http.ResponseWriter
	status   int
	buf      bytes.Buffer
	overflow bool
	failed   bool // the answer tells of a failure in spite of its status
}

func (c *capture) WriteHeader(status int) {
	c.status = status
	c.ResponseWriter.WriteHeader(status)
}

func (c *capture) Write(p []byte) (int, error) {
	if c.buf.Len()+len(p) > replayBytes/8 {
		c.overflow = true
	} else if !c.overflow {
		c.buf.Write(p)
	}
	return c.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController reach Flush of the real writer.
func (c *capture) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// forget marks an answer that has begun as not worth repeating.
func forget(w http.ResponseWriter) {
	if c, ok := w.(*capture); ok {
		c.failed = true
	}
}

// repeatable tells whether the client can fetch the answer again by its key.
func repeatable(w http.ResponseWriter) bool {
	_, ok := w.(*capture)
	return ok
}
