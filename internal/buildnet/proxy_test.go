package buildnet

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// rig is a network whose guest is this test and whose world is a map of names.
type rig struct {
	*Network
	t     *testing.T
	conns chan net.Conn
	end   func() error

	mu     sync.Mutex
	names  map[string][]netip.Addr
	dialed []netip.AddrPort
	log    []Connection
	real   string // where every dialed address leads to
}

func newRig(t *testing.T, settings Settings, allow ...string) *rig {
	t.Helper()
	r := &rig{t: t, conns: make(chan net.Conn), names: map[string][]netip.Addr{}}
	var err error
	r.Network, err = New(Config{
		Settings: settings, Allow: allow,
		Log: func(c Connection) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.log = append(r.log, c)
		},
		Resolve: func(_ context.Context, name string) ([]netip.Addr, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if a := r.names[name]; a != nil {
				return append([]netip.Addr(nil), a...), nil
			}
			return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
		},
		Dial: func(ctx context.Context, a netip.AddrPort) (net.Conn, error) {
			r.mu.Lock()
			r.dialed = append(r.dialed, a)
			r.mu.Unlock()
			return new(net.Dialer).DialContext(ctx, "tcp", r.real)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- r.Serve(ctx, func(ctx context.Context) (net.Conn, error) {
			select {
			case c := <-r.conns:
				return c, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		})
	}()
	r.end = sync.OnceValue(func() error {
		cancel()
		return <-served
	})
	t.Cleanup(func() {
		if err := r.end(); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return r
}

func (r *rig) host(name string, addrs ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range addrs {
		r.names[name] = append(r.names[name], netip.MustParseAddr(a))
	}
}

// dialProxy is a program of the guest that connects to the proxy. The pipe is a
// socket, so that one direction can end before the other.
func (r *rig) connection() net.Conn {
	r.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		r.t.Fatal(err)
	}
	far, err := l.Accept()
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { near.Close() })
	_ = near.SetDeadline(time.Now().Add(20 * time.Second))
	r.conns <- far
	return near
}

// ask sends raw bytes and reads one response.
func (r *rig) ask(request string) (*http.Response, string) {
	r.t.Helper()
	conn := r.connection()
	defer conn.Close()
	if _, err := io.WriteString(conn, request); err != nil {
		r.t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		r.t.Fatalf("%q: %v", request, err)
	}
	body, _ := io.ReadAll(res.Body)
	return res, string(body)
}

func (r *rig) client() *http.Client {
	return &http.Client{Transport: &http.Transport{
		Proxy:             http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy"}),
		DialContext:       func(context.Context, string, string) (net.Conn, error) { return r.connection(), nil },
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the test's own server
		DisableKeepAlives: true,
	}}
}

func (r *rig) serve(secure bool, h http.HandlerFunc) {
	srv := httptest.NewUnstartedServer(h)
	if secure {
		srv.StartTLS()
	} else {
		srv.Start()
	}
	r.t.Cleanup(srv.Close)
	r.real = srv.Listener.Addr().String()
}

func TestTunnel(t *testing.T) {
	r := newRig(t, Settings{}, "files.example")
	r.host("files.example", "93.184.215.14")
	big := strings.Repeat("0123456789", 100_000)
	r.serve(true, func(w http.ResponseWriter, req *http.Request) { fmt.Fprint(w, req.Host, big) })
	res, err := r.client().Get("https://files.example/x")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if body, err := io.ReadAll(res.Body); err != nil || string(body) != "files.example"+big {
		t.Errorf("%d bytes, %v", len(body), err)
	}
	r.client().CloseIdleConnections()
	if err := r.end(); err != nil {
		t.Error(err)
	}
	if len(r.dialed) != 1 || r.dialed[0].String() != "93.184.215.14:443" {
		t.Errorf("dialed %v", r.dialed)
	}
	if len(r.log) != 1 || r.log[0].Host != "files.example:443" || r.log[0].Received < int64(len(big)) || r.log[0].Sent == 0 {
		t.Errorf("log %+v", r.log)
	}
	if total := r.Totals(); total.Connections != 1 || total.Open != 0 || total.Received < int64(len(big)) {
		t.Errorf("totals %+v", total)
	}
}

func TestPlainRequest(t *testing.T) {
	r := newRig(t, Settings{}, "apt.example")
	r.host("apt.example", "93.184.215.14")
	r.serve(false, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/moved" {
			http.Redirect(w, req, "http://other.example/", http.StatusFound)
			return
		}
		body, _ := io.ReadAll(req.Body)
		fmt.Fprintf(w, "%s %s %q %q %s", req.Host, req.URL, req.Header.Get("Proxy-Authorization"), req.Header.Get("X-Forwarded-For"), body)
	})
	res, body := r.ask("POST http://apt.example/a%2Fb?q=1 HTTP/1.1\r\nHost: evil.example\r\nProxy-Authorization: Basic eDp5\r\nContent-Length: 3\r\n\r\nabc")
	if res.StatusCode != 200 || body != `apt.example /a%2Fb?q=1 "" "" abc` {
		t.Errorf("%s %q", res.Status, body)
	}
	// A redirection is the guest's to follow, and to be refused there.
	if res, _ := r.ask("GET http://apt.example/moved HTTP/1.1\r\nHost: apt.example\r\n\r\n"); res.StatusCode != http.StatusFound {
		t.Errorf("%s", res.Status)
	}
}

// TestRefusals: nothing of this makes the host connect to anywhere.
func TestRefusals(t *testing.T) {
	settings := Settings{registries: []rule{{host: "registry.example", port: 8443, registry: true}}}
	r := newRig(t, settings, "inside.example", "mixed.example", "meta.example", "*.wide.example", "empty.example")
	r.host("inside.example", "10.0.0.5")
	r.host("mixed.example", "93.184.215.14", "127.0.0.1")
	r.host("meta.example", "169.254.169.254")
	r.host("mapped.wide.example", "::ffff:192.168.0.1")
	r.host("registry.example", "169.254.169.254")
	for _, c := range []struct {
		request string
		status  int
		says    string
	}{
		{"CONNECT unlisted.example:443", 403, "unlisted.example:443 is not allowed in this build: allow it with --allow-host unlisted.example"},
		{"CONNECT inside.example:22", 403, "--allow-host inside.example:22"},
		{"CONNECT inside.example:443", 403, "10.0.0.5, a private address"},
		{"CONNECT mixed.example:443", 403, "127.0.0.1, a loopback address"},
		{"CONNECT meta.example:80", 403, "metadata service"},
		{"CONNECT mapped.wide.example:443", 403, "a private address"},
		{"CONNECT registry.example:8443", 403, "metadata service"},
		{"CONNECT registry.example:443", 403, "not allowed"},
		{"CONNECT 169.254.169.254:80", 403, "metadata service"},
		{"CONNECT 127.0.0.1:8889", 403, "a loopback address"},
		{"CONNECT [::1]:8889", 403, "a loopback address"},
		{"CONNECT localhost:80", 403, "not allowed"},
		{"CONNECT 2130706433:80", 403, "not allowed"},
		{"CONNECT nowhere.wide.example:443", 502, "cannot reach nowhere.wide.example:443"},
		{"CONNECT inside.example:0", 400, ""},
		{"CONNECT inside.example:x", 400, ""},
		{"GET http://unlisted.example/", 403, "not allowed"},
		{"GET http://inside.example/", 403, "a private address"},
		{"GET http://inside.example:443@unlisted.example/", 403, "not allowed"},
		{"GET https://inside.example/", 400, ""},
		{"GET ftp://inside.example/", 400, ""},
		{"GET /", 400, ""},
	} {
		res, body := r.ask(c.request + " HTTP/1.1\r\nHost: inside.example\r\n\r\n")
		if res.StatusCode != c.status || !strings.Contains(body, c.says) {
			t.Errorf("%s: %s %q, want %d with %q", c.request, res.Status, body, c.status, c.says)
		}
		if c.status == 403 && strings.HasPrefix(c.request, "CONNECT") && !strings.Contains(res.Status, c.says) {
			t.Errorf("%s: the status line %q does not say why", c.request, res.Status)
		}
	}
	if len(r.dialed) > 0 {
		t.Errorf("dialed %v", r.dialed)
	}
	refused := strings.Join(r.Refused(), "\n")
	for _, name := range []string{"unlisted.example:443", "inside.example:443", "meta.example:80"} {
		if !strings.Contains(refused, name) {
			t.Errorf("%s is not among the refused:\n%s", name, refused)
		}
	}
}

// TestRebinding: the address that was checked is the one that is dialed, also if
// the name means another one a moment later.
func TestRebinding(t *testing.T) {
	r := newRig(t, Settings{}, "changing.example")
	r.serve(false, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	answers := [][]netip.Addr{{netip.MustParseAddr("93.184.215.14")}, {netip.MustParseAddr("127.0.0.1")}}
	r.resolver = func(context.Context, string) ([]netip.Addr, error) {
		a := answers[0]
		answers = append(answers[1:], a)
		return a, nil
	}
	conn := r.connection()
	fmt.Fprint(conn, "CONNECT changing.example:80 HTTP/1.1\r\nHost: x\r\n\r\n")
	if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != 200 {
		t.Fatalf("%v, %v", res, err)
	}
	if len(r.dialed) != 1 || r.dialed[0].Addr().String() != "93.184.215.14" {
		t.Errorf("dialed %v", r.dialed)
	}
	if res, _ := r.ask("CONNECT changing.example:80 HTTP/1.1\r\nHost: x\r\n\r\n"); res.StatusCode != 403 {
		t.Errorf("the second meaning of the name: %s", res.Status)
	}
}

// TestRegistryInside: a registry that the host is configured for may be private.
func TestRegistryInside(t *testing.T) {
	r := newRig(t, Settings{registries: []rule{{host: "mirror.example", registry: true}}})
	r.host("mirror.example", "10.1.1.1")
	r.serve(false, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "packages") })
	if res, body := r.ask("GET http://mirror.example/ HTTP/1.1\r\nHost: x\r\n\r\n"); res.StatusCode != 200 || body != "packages" {
		t.Errorf("%s %q", res.Status, body)
	}
}

// TestHostProxy: where the host has a proxy, that one is asked, with its password.
func TestHostProxy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	seen := make(chan string, 2)
	upstream := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		seen <- req.Method + " " + req.Host + " " + req.Header.Get("Proxy-Authorization")
		if req.Method != http.MethodConnect {
			fmt.Fprint(w, "plain")
			return
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 200 OK\r\n\r\ntunneled")
	})}
	go func() { _ = upstream.Serve(l) }()
	t.Cleanup(func() { upstream.Close() })
	address := "http://u:p@" + l.Addr().String()
	settings := host{env: map[string]string{"https_proxy": address, "http_proxy": address}}.detect()
	r := newRig(t, settings, "far.example")
	conn := r.connection()
	fmt.Fprint(conn, "CONNECT far.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
	reader := bufio.NewReader(conn)
	if res, err := http.ReadResponse(reader, &http.Request{Method: http.MethodConnect}); err != nil || res.StatusCode != 200 {
		t.Fatalf("%v, %v", res, err)
	}
	if rest, err := io.ReadAll(reader); err != nil || string(rest) != "tunneled" {
		t.Errorf("tunnel gives %q, %v", rest, err)
	}
	if got := <-seen; got != "CONNECT far.example:443 Basic dTpw" {
		t.Errorf("the proxy saw %q", got)
	}
	if res, body := r.ask("GET http://far.example/ HTTP/1.1\r\nHost: x\r\n\r\n"); res.StatusCode != 200 || body != "plain" {
		t.Errorf("%s %q", res.Status, body)
	}
	if got := <-seen; got != "GET far.example Basic dTpw" {
		t.Errorf("the proxy saw %q", got)
	}
	// The proxy itself is no destination.
	if res, _ := r.ask("GET http://" + l.Addr().String() + "/ HTTP/1.1\r\nHost: x\r\n\r\n"); res.StatusCode != 403 {
		t.Errorf("request to the proxy itself: %s", res.Status)
	}
}

// TestEnd: the end of a build ends connections that are open, and all goroutines.
func TestEnd(t *testing.T) {
	before := runtime.NumGoroutine()
	r := newRig(t, Settings{}, "slow.example")
	r.host("slow.example", "93.184.215.14")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r.real = l.Addr().String()
	conn := r.connection()
	fmt.Fprint(conn, "CONNECT slow.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
	if res, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || res.StatusCode != 200 {
		t.Fatalf("%v, %v", res, err)
	}
	idle := r.connection()
	if err := r.end(); err != nil {
		t.Error(err)
	}
	for _, c := range []net.Conn{conn, idle} {
		if _, err := io.ReadAll(c); errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a connection stayed open: %v", err)
		}
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 300 {
		if runtime.NumGoroutine() <= before {
			return
		}
		<-tick.C
	}
	t.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
}

// TestGarbage: a guest that sends no HTTP harms only its own connection.
func TestGarbage(t *testing.T) {
	r := newRig(t, Settings{}, "files.example")
	for _, bytes := range []string{"\x00\x01\x02\r\n\r\n", "GET " + strings.Repeat("a", 1<<20) + " HTTP/1.1\r\n\r\n", "CONNECT\r\n\r\n", "\r\n\r\n\r\n\r\n"} {
		conn := r.connection()
		_, _ = io.WriteString(conn, bytes)
		_ = conn.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, conn)
	}
	if res, _ := r.ask("CONNECT no.example:443 HTTP/1.1\r\nHost: x\r\n\r\n"); res.StatusCode != 403 {
		t.Errorf("after garbage: %s", res.Status)
	}
}
