package rest

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	api "forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
)

// rig is a served front end over a fake.
type rig struct {
	t   *testing.T
	svc *resttest.Service
	url string
	log *logBuffer
}

// logBuffer collects the log of concurrent requests.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func newRig(t *testing.T, change func(*Config)) *rig {
	t.Helper()
	r := &rig{t: t, svc: resttest.New(), log: &logBuffer{}}
	c := Config{Service: r.svc, Version: "test", Log: slog.New(slog.NewTextHandler(r.log, nil))}
	if change != nil {
		change(&c)
	}
	h, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	r.url = resttest.ServeTCP(t, h)
	return r
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   string
}

// do sends a request; headers are "Key: value".
func (r *rig) do(method, path, body string, headers ...string) answer {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", api.JSON)
	}
	for _, h := range headers {
		k, v, _ := strings.Cut(h, ": ")
		if k == "Host" {
			req.Host = v
			continue
		}
		req.Header.Set(k, v)
		if v == "" {
			req.Header.Del(k)
		}
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	defer client.CloseIdleConnections()
	res, err := client.Do(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{res.StatusCode, res.Header, string(raw)}
}

// into decodes the body.
func into[T any](t *testing.T, a answer) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(a.body), &v); err != nil {
		t.Fatalf("answer %q: %v", a.body, err)
	}
	return v
}

// fork makes one sandbox and returns its id.
func (r *rig) fork() string {
	r.t.Helper()
	a := r.do("POST", "/v1/sandboxes", `{"snapshot_tag":"py-base"}`)
	if a.status != http.StatusCreated {
		r.t.Fatalf("fork: %d %s", a.status, a.body)
	}
	return into[[]api.Sandbox](r.t, a)[0].ID
}

func contextWith(r *http.Request, local net.Addr) context.Context {
	return context.WithValue(r.Context(), http.LocalAddrContextKey, local)
}

func newServerLog() *slog.Logger { return slog.New(slog.DiscardHandler) }
