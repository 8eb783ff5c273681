package rest

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/frontend/rest/resttest"
)

func TestToken(t *testing.T) {
	const token = "0123456789abcdef-token"
	r := newRig(t, func(c *Config) { c.Token = token })
	for _, c := range []struct {
		name, path, header string
		status             int
	}{
		{"healthz is open", "/healthz", "", 200},
		{"healthz/ is open", "/healthz/", "", 200},
		{"version is not", "/version", "", 401},
		{"missing", "/v1/sandboxes", "", 401},
		{"wrong", "/v1/sandboxes", "Bearer " + token + "x", 401},
		{"prefix", "/v1/sandboxes", "Bearer " + token[:8], 401},
		{"empty", "/v1/sandboxes", "Bearer ", 401},
		{"other scheme", "/v1/sandboxes", "Basic " + token, 401},
		{"unknown route", "/v1/nothing", "", 401},
		{"good", "/v1/sandboxes", "Bearer " + token, 200},
		{"good in lower case", "/v1/sandboxes", "bearer " + token, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := r.do("GET", c.path, "", "Authorization: "+c.header)
			if a.status != c.status {
				t.Errorf("got %d %s, want %d", a.status, a.body, c.status)
			}
			if a.status == 401 && a.header.Get("WWW-Authenticate") != "Bearer" {
				t.Errorf("401 without WWW-Authenticate")
			}
		})
	}
	// With a token a foreign Host is fine: the token is what counts.
	if a := r.do("GET", "/v1/sandboxes", "", "Authorization: Bearer "+token, "Host: forkd.example", "Origin: https://x.example"); a.status != 200 {
		t.Errorf("with a token: %d %s", a.status, a.body)
	}
	if strings.Contains(r.log.String(), token) {
		t.Error("the log holds the token")
	}
}

func TestLoopbackWithoutToken(t *testing.T) {
	r := newRig(t, func(c *Config) { c.AllowedHosts = []string{"Forkd.Internal"} })
	for _, c := range []struct {
		header string
		status int
	}{
		{"Host: 127.0.0.1:8889", 200},
		{"Host: 127.0.0.9", 200},
		{"Host: localhost:8889", 200},
		{"Host: LOCALHOST", 200},
		{"Host: [::1]:8889", 200},
		{"Host: forkd.internal:80", 200},
		{"Host: evil.example", 403},
		{"Host: 127.0.0.1.evil.example", 403},
		{"Host: 192.0.2.1:8889", 403},
		{"Origin: http://127.0.0.1:8889", 403},
		{"Origin: null", 403},
	} {
		if a := r.do("GET", "/v1/sandboxes", "", c.header); a.status != c.status {
			t.Errorf("%s: got %d %s, want %d", c.header, a.status, a.body, c.status)
		}
	}
}

// TestWhoIsServed asks the rule itself about addresses a test cannot listen on.
func TestWhoIsServed(t *testing.T) {
	for _, c := range []struct {
		name  string
		token string
		local net.Addr
		want  bool
	}{
		{"unix", "", &net.UnixAddr{Net: "unix"}, true},
		{"unix with a token set", "t", &net.UnixAddr{Net: "unix"}, true},
		{"loopback", "", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, true},
		{"loopback 6", "", &net.TCPAddr{IP: net.IPv6loopback}, true},
		{"beyond loopback", "", &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1)}, false},
		{"unknown", "", nil, false},
		{"loopback with a token set", "t", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}, false},
	} {
		req, _ := http.NewRequest(http.MethodGet, "http://127.0.0.1/v1/sandboxes", nil)
		if c.local != nil {
			req = req.WithContext(contextWith(req, c.local))
		}
		err := newAccess(Config{Token: c.token}).check(req)
		if (err == nil) != c.want {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestUnixSocketNeedsNoHost(t *testing.T) {
	h, err := New(Config{Service: resttest.New(), Token: "a-token-nobody-sends"})
	if err != nil {
		t.Fatal(err)
	}
	path := resttest.ServeUnix(t, h)
	client := &http.Client{Transport: &http.Transport{Dial: func(string, string) (net.Conn, error) { return net.Dial("unix", path) }}}
	defer client.CloseIdleConnections()
	res, err := client.Get("http://whatever/v1/sandboxes")
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusOK {
		t.Errorf("got %s", res.Status)
	}
}
