package forkd_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/frontend/rest"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
	"forkd.dev/forkd/internal/sandbox"
	forkd "forkd.dev/forkd/sdk/go"
)

// noEnv is an empty environment, so that no daemon of this host is found.
func noEnv(string) string { return "" }

// rig is a client of the real front end over a fake, by a unix socket.
func rig(t *testing.T) (*forkd.Client, *resttest.Service) {
	t.Helper()
	svc := resttest.New()
	h, err := rest.New(rest.Config{Service: svc, Version: "test"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := forkd.New(forkd.Options{Socket: resttest.ServeUnix(t, h), Getenv: noEnv})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c, svc
}

func TestLife(t *testing.T) {
	c, svc := rig(t)
	ctx := t.Context()
	var ready []int
	res, err := c.Fork(ctx, forkd.ForkRequest{SnapshotTag: "py-base", N: forkd.Int(3)}, &forkd.ForkWatch{
		Ready: func(i int, sb forkd.Sandbox) { ready = append(ready, i) },
	})
	if err != nil || len(res.Sandboxes) != 3 || len(ready) != 3 {
		t.Fatalf("fork: %+v, %v", res, err)
	}
	id := res.Sandboxes[0].ID
	if sb, err := c.Sandbox(ctx, id); err != nil || sb.Usage == nil {
		t.Errorf("sandbox: %+v, %v", sb, err)
	}
	if e, err := c.Exec(ctx, id, forkd.ExecRequest{Args: []string{"cat"}, StdinBase64: []byte("in\x00")}); err != nil || !strings.Contains(e.Stdout, "in\x00") {
		t.Errorf("exec: %+v, %v", e, err)
	}
	if e, err := c.Eval(ctx, id, forkd.EvalRequest{Code: "1"}); err != nil || *e.Result != "1" {
		t.Errorf("eval: %+v, %v", e, err)
	}
	if p, err := c.Ping(ctx, id); err != nil || !p.Pong {
		t.Errorf("ping: %+v, %v", p, err)
	}
	if list, err := c.Sandboxes(ctx); err != nil || len(list) != 3 {
		t.Errorf("list: %+v, %v", list, err)
	}
	if err := c.Kill(ctx, id); err != nil || len(svc.Living()) != 2 {
		t.Errorf("kill: %v", err)
	}
	if v, err := c.Version(ctx); err != nil || v.Version != "test" {
		t.Errorf("version: %+v, %v", v, err)
	}
	if err := c.Health(ctx); err != nil {
		t.Errorf("health: %v", err)
	}
}

func TestSnapshotsAndImages(t *testing.T) {
	c, _ := rig(t)
	ctx := t.Context()
	var steps []string
	note := func(step string, _ float64) { steps = append(steps, step) }
	sn, err := c.CreateSnapshot(ctx, forkd.SnapshotRequest{Tag: "x", From: "py-base"}, note)
	if err != nil || sn.Tag != "x" {
		t.Fatalf("create: %+v, %v", sn, err)
	}
	if err := c.TagSnapshot(ctx, "x", "y", forkd.TagNew); err != nil {
		t.Errorf("tag: %v", err)
	}
	if err := c.TagSnapshot(ctx, "x", "py-base", forkd.TagNew); !errors.Is(err, forkd.ErrConflict) {
		t.Errorf("taken tag: %v", err)
	}
	if err := c.Untag(ctx, "y"); err != nil {
		t.Errorf("untag: %v", err)
	}
	if d, err := c.Snapshot(ctx, "x"); err != nil || d.ParentTag != "py-base" {
		t.Errorf("info: %+v, %v", d, err)
	}
	if err := c.DeleteSnapshot(ctx, "py-base", forkd.DeleteAlone); !errors.Is(err, forkd.ErrConflict) {
		t.Errorf("delete of a parent: %v", err)
	}
	if err := c.DeleteSnapshot(ctx, "x", forkd.DeleteCascade); err != nil {
		t.Errorf("delete: %v", err)
	}
	if im, err := c.BuildImage(ctx, forkd.ImageRequest{Name: "tools"}, note); err != nil || im.Name != "tools" {
		t.Errorf("build: %+v, %v", im, err)
	}
	if err := c.RemoveImage(ctx, "tools"); err != nil {
		t.Errorf("remove: %v", err)
	}
	if got := strings.Join(steps, ","); got != "boot,packages" {
		t.Errorf("progress: %s", got)
	}
}

// TestErrorsCrossTheWire: each class is the same on both sides, in answers and in streams.
func TestErrorsCrossTheWire(t *testing.T) {
	c, svc := rig(t)
	for _, class := range []error{
		forkd.ErrInvalid, forkd.ErrNotFound, forkd.ErrConflict, forkd.ErrNotReady, forkd.ErrPermission, forkd.ErrUnauthenticated,
		forkd.ErrUnsupported, forkd.ErrResourceExhausted, forkd.ErrUnavailable, forkd.ErrTimeout, forkd.ErrCanceled, forkd.ErrCorrupt,
		forkd.ErrIncompatible, forkd.ErrGuest, forkd.ErrInternal,
	} {
		svc.Err = errdefs.WithHint(errdefs.New(class, "what happened"), "what to do")
		_, plain := c.Sandbox(t.Context(), "x")
		_, stream := c.CreateSnapshot(t.Context(), forkd.SnapshotRequest{Tag: "x"}, nil)
		for _, err := range []error{plain, stream} {
			if !errors.Is(err, class) || err.Error() != "what happened" || forkd.Hint(err) != "what to do" {
				t.Errorf("%v came as %v (hint %q)", class, err, forkd.Hint(err))
			}
		}
	}
}

func TestPartialFork(t *testing.T) {
	c, svc := rig(t)
	svc.FailChild = map[int]error{0: errdefs.New(errdefs.ErrGuest, "silent")}
	var failed error
	req := forkd.ForkRequest{SnapshotTag: "py-base", N: forkd.Int(2), Partial: true}
	res, err := c.Fork(t.Context(), req, &forkd.ForkWatch{Failed: func(_ int, err error) { failed = err }})
	if err != nil || len(res.Sandboxes) != 1 || len(res.Failures) != 1 || res.Failures[0].Index != 0 || !errors.Is(failed, forkd.ErrGuest) {
		t.Errorf("partial: %+v, %v, %v", res, err, failed)
	}
	req.Partial = false
	if _, err := c.Fork(t.Context(), req, nil); !errors.Is(err, forkd.ErrGuest) {
		t.Errorf("whole: %v", err)
	}
}

func TestCancelEndsTheRequest(t *testing.T) {
	c, svc := rig(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	svc.OnFork = func(ctx context.Context, _ sandbox.Fork) error {
		cancel()
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	}
	if _, err := c.Fork(ctx, forkd.ForkRequest{SnapshotTag: "py-base"}, nil); !errors.Is(err, context.Canceled) || !errors.Is(err, forkd.ErrCanceled) {
		t.Errorf("fork: %v", err)
	}
	<-ended
}

func TestRepeatByKey(t *testing.T) {
	c, svc := rig(t)
	watch := &forkd.ForkWatch{Key: "k"}
	first, err := c.Fork(t.Context(), forkd.ForkRequest{SnapshotTag: "py-base"}, watch)
	if err != nil {
		t.Fatal(err)
	}
	again, err := c.Fork(t.Context(), forkd.ForkRequest{SnapshotTag: "py-base"}, watch)
	if err != nil || again.Sandboxes[0].ID != first.Sandboxes[0].ID || len(svc.Living()) != 1 {
		t.Errorf("again: %+v, %v", again, err)
	}
}

// TestStrangeServers: what is not forkd, or breaks off, is a clear error.
func TestStrangeServers(t *testing.T) {
	for name, handle := range map[string]http.HandlerFunc{
		"html": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "<h1>hello</h1>", http.StatusTeapot) },
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://other.example/", http.StatusFound)
		},
		"broken off": func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(`{"progress":{"step":"x"}}` + "\n")) },
		"not JSON":   func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("hello\n")) },
		"huge index": func(w http.ResponseWriter, _ *http.Request) {
			w.Write([]byte(`{"index":9999999999,"sandbox":{"id":"x"}}` + "\n"))
		},
		"nothing":     func(http.ResponseWriter, *http.Request) {},
		"empty error": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) },
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewServer(handle)
			defer srv.Close()
			c, err := forkd.New(forkd.Options{BaseURL: srv.URL, Getenv: noEnv})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Fork(t.Context(), forkd.ForkRequest{SnapshotTag: "x"}, nil); err == nil {
				t.Error("fork gave no error")
			}
			if list, err := c.Sandboxes(t.Context()); err == nil {
				t.Errorf("list gave %v", list)
			}
		})
	}
}

func TestToken(t *testing.T) {
	svc := resttest.New()
	h, err := rest.New(rest.Config{Service: svc, Token: "right-token-of-16-bytes"})
	if err != nil {
		t.Fatal(err)
	}
	url := resttest.ServeTCP(t, h)
	for token, want := range map[string]error{"right-token-of-16-bytes": nil, "wrong": forkd.ErrUnauthenticated, "": forkd.ErrUnauthenticated} {
		c, err := forkd.New(forkd.Options{BaseURL: url + "/", Token: token, Getenv: noEnv})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Sandboxes(t.Context()); !errors.Is(err, want) {
			t.Errorf("token %q: %v", token, err)
		}
		c.Close()
	}
}

func TestDiscovery(t *testing.T) {
	data := t.TempDir()
	env := map[string]string{"XDG_DATA_HOME": data}
	getenv := func(k string) string { return env[k] }
	target := func() string {
		t.Helper()
		c, err := forkd.New(forkd.Options{Getenv: getenv})
		if err != nil {
			t.Fatal(err)
		}
		return c.Target()
	}
	if _, err := os.Stat(forkd.SystemSocket); err == nil {
		t.Skip("a daemon of this host has a socket at " + forkd.SystemSocket)
	}
	if got := target(); got != forkd.DefaultURL {
		t.Errorf("without a socket: %s", got)
	}
	dir := filepath.Join(data, "forkd")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "forkd.sock")
	if err := os.WriteFile(socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := target(); got != forkd.DefaultURL {
		t.Errorf("with a dead socket: %s", got)
	}
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if got := target(); got != "unix://"+socket {
		t.Errorf("with a socket: %s", got)
	}
	env["FORKD_URL"] = "http://127.0.0.1:1"
	if got := target(); got != "http://127.0.0.1:1" {
		t.Errorf("with FORKD_URL: %s", got)
	}
	for _, bad := range []string{"127.0.0.1:8889", "ftp://x", "unix://", "http://", "://"} {
		env["FORKD_URL"] = bad
		if _, err := forkd.New(forkd.Options{Getenv: getenv}); !errors.Is(err, forkd.ErrInvalid) {
			t.Errorf("FORKD_URL=%s: %v", bad, err)
		}
	}
}

func TestNoDaemon(t *testing.T) {
	c, err := forkd.New(forkd.Options{Socket: filepath.Join(t.TempDir(), "none.sock"), Getenv: noEnv})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Sandboxes(t.Context())
	if !errors.Is(err, forkd.ErrNoDaemon) || !errors.Is(err, forkd.ErrUnavailable) || forkd.Hint(err) != "start one with: forkd serve" {
		t.Errorf("%v (hint %q)", err, forkd.Hint(err))
	}
}

// TestExactBytes: output that is no text comes through unchanged.
func TestExactBytes(t *testing.T) {
	c, svc := rig(t)
	res, err := c.Fork(t.Context(), forkd.ForkRequest{SnapshotTag: "py-base"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := "\x00\xfe\xff\n<&>\u2028"
	svc.OnExec = func(context.Context, string, agentwire.ExecRequest) (agentwire.ExecResult, error) {
		return agentwire.ExecResult{Stdout: []byte(want), Stderr: []byte("<&>\u2028")}, nil
	}
	got, err := c.Exec(t.Context(), res.Sandboxes[0].ID, forkd.ExecRequest{Args: []string{"x"}})
	if err != nil || string(got.StdoutBytes()) != want || string(got.StderrBytes()) != "<&>\u2028" {
		t.Errorf("%q %q %v", got.StdoutBytes(), got.StderrBytes(), err)
	}
}
