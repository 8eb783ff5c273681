package rest

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/sandbox"
)

func TestIdempotentCreate(t *testing.T) {
	r := newRig(t, nil)
	const body, key = `{"snapshot_tag":"py-base","n":2}`, "Idempotency-Key: k1"
	first := r.do("POST", "/v1/sandboxes", body, key)
	again := r.do("POST", "/v1/sandboxes", body, key)
	if first.status != http.StatusCreated || again.status != http.StatusCreated || again.body != first.body || again.header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("first %d %s\nagain %d %s", first.status, first.body, again.status, again.body)
	}
	if n := len(r.svc.Living()); n != 2 {
		t.Errorf("%d sandboxes", n)
	}
	if a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":3}`, key); a.status != http.StatusConflict {
		t.Errorf("other request: %d %s", a.status, a.body)
	}
	if a := r.do("POST", "/v1/sandboxes", body, key, "Accept: application/x-ndjson"); a.status != http.StatusConflict {
		t.Errorf("other form: %d %s", a.status, a.body)
	}
	if a := r.do("POST", "/v1/sandboxes", body, "Idempotency-Key: k2"); a.status != http.StatusCreated || a.body == first.body {
		t.Errorf("other key: %d %s", a.status, a.body)
	}
}

func TestFailuresAreNotRemembered(t *testing.T) {
	r := newRig(t, nil)
	for _, accept := range []string{"application/json", "application/x-ndjson"} {
		key := "Idempotency-Key: " + accept
		r.svc.FailChild = map[int]error{1: errdefs.New(errdefs.ErrGuest, "silent")}
		a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":2}`, key, "Accept: "+accept)
		if !strings.Contains(a.body, "guest_failure") {
			t.Errorf("%s: %d %s", accept, a.status, a.body)
		}
		r.svc.FailChild = nil
		a = r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base","n":2}`, key, "Accept: "+accept)
		if a.status/100 != 2 || strings.Contains(a.body, "guest_failure") {
			t.Errorf("%s, repeated: %d %s", accept, a.status, a.body)
		}
	}
}

// TestConcurrentRepeatsCreateOnce sends the same request ten times at once.
func TestConcurrentRepeatsCreateOnce(t *testing.T) {
	r := newRig(t, nil)
	release := make(chan struct{})
	r.svc.OnFork = func(context.Context, sandbox.Fork) error { <-release; return nil }
	var wg sync.WaitGroup
	bodies := make([]string, 10)
	for i := range bodies {
		wg.Go(func() {
			bodies[i] = r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base"}`, "Idempotency-Key: same").body
		})
	}
	close(release)
	wg.Wait()
	for _, b := range bodies {
		if b != bodies[0] {
			t.Errorf("answers differ: %s and %s", b, bodies[0])
		}
	}
	if n := len(r.svc.Living()); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
}

func TestReplaysAreBounded(t *testing.T) {
	now := time.Unix(0, 0)
	p := newReplays(func() time.Time { return now })
	put := func(key string, size int) {
		e, mine := p.claim(key, [32]byte{})
		if !mine {
			t.Fatalf("%s is there already", key)
		}
		c := &capture{ResponseWriter: nullWriter{}}
		c.WriteHeader(http.StatusCreated)
		c.Write(make([]byte, size))
		p.settle(key, e, c, true)
	}
	for i := range replayEntries + 10 {
		put(fmt.Sprintf("k%d", i), 1)
	}
	if len(p.entries) != replayEntries || p.size != replayEntries {
		t.Errorf("%d entries of %d bytes", len(p.entries), p.size)
	}
	for i := range 20 {
		put(fmt.Sprintf("big%d", i), replayBytes/8)
	}
	if p.size > replayBytes {
		t.Errorf("%d bytes remembered", p.size)
	}
	put("too-big", replayBytes/8+1)
	if _, ok := p.entries["too-big"]; ok {
		t.Error("an answer over the limit is remembered")
	}
	now = now.Add(replayAge)
	if _, mine := p.claim("big19", [32]byte{}); !mine {
		t.Error("an old answer is remembered")
	}
}

type nullWriter struct{}

func (nullWriter) Header() http.Header         { return http.Header{} }
func (nullWriter) Write(p []byte) (int, error) { return len(p), nil }
func (nullWriter) WriteHeader(int)             {}
