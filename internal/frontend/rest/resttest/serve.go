package resttest

import (
	"net"
	"net/http"
	"path/filepath"
	"testing"
)

// ServeUnix serves handler on a unix socket until the test ends, and returns the
// socket's path.
func ServeUnix(t testing.TB, handler http.Handler) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "forkd.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatalf("listen on %s: %v", path, err)
	}
	serve(t, l, handler)
	return path
}

// ServeTCP serves handler on loopback until the test ends, and returns its URL.
func ServeTCP(t testing.TB, handler http.Handler) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen on loopback: %v", err)
	}
	serve(t, l, handler)
	return "http://" + l.Addr().String()
}

func serve(t testing.TB, l net.Listener, handler http.Handler) {
	srv := &http.Server{Handler: handler}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l) // ends with ErrServerClosed
	}()
	t.Cleanup(func() {
		srv.Close()
		<-done
	})
}
