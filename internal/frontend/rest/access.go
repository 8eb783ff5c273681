package rest

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// access decides who may ask. A unix socket is guarded by its file mode alone.
// Over TCP the token is required if there is one; without one only loopback is
// served, and there a foreign Host or any Origin is refused, so that a web page
// in a browser on this machine cannot reach the API.
type access struct {
	hasToken bool
	token    [sha256.Size]byte
	hosts    map[string]bool
}

func newAccess(c Config) access {
	a := access{hasToken: c.Token != "", token: sha256.Sum256([]byte(c.Token)), hosts: map[string]bool{}}
	for _, h := range c.AllowedHosts {
		a.hosts[strings.ToLower(h)] = true
	}
	return a
}

// check returns why r is refused, or nil.
func (a access) check(r *http.Request) error {
	if r.URL.Path == "/healthz" || r.URL.Path == "/healthz/" {
		return nil
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	switch {
	case local != nil && local.Network() == "unix":
		return nil
	case a.hasToken:
		return a.checkToken(r.Header.Get("Authorization"))
	case !isLoopback(local):
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnauthenticated, "no token is set, so only loopback and the unix socket are served"),
			"start the daemon with --token-file")
	}
	return a.checkBrowser(r)
}

// checkToken compares digests, so neither content nor length leaks by time.
func (a access) checkToken(header string) error {
	scheme, token, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return errdefs.WithHint(errdefs.New(errdefs.ErrUnauthenticated, "missing bearer token"), "set FORKD_TOKEN, or use the daemon's unix socket")
	}
	sum := sha256.Sum256([]byte(strings.TrimSpace(token)))
	if subtle.ConstantTimeCompare(sum[:], a.token[:]) != 1 {
		return errdefs.New(errdefs.ErrUnauthenticated, "invalid bearer token")
	}
	return nil
}

func (a access) checkBrowser(r *http.Request) error {
	if r.Header.Get("Origin") != "" {
		return errdefs.WithHint(errdefs.New(errdefs.ErrPermission, "requests of web pages (Origin header) are refused without a token"),
			"start the daemon with --token-file and send the token")
	}
	host := hostOf(r.Host)
	if host != "localhost" && !a.hosts[host] && !isLoopbackText(host) {
		return errdefs.WithHint(errdefs.New(errdefs.ErrPermission, "host %.80q is not this daemon's loopback address", r.Host),
			"use http://127.0.0.1 or http://localhost, or start the daemon with --token-file")
	}
	return nil
}

// hostOf returns the host of a Host header without port and brackets.
func hostOf(header string) string {
	host, _, err := net.SplitHostPort(header)
	if err != nil {
		host = header
	}
	return strings.ToLower(strings.Trim(host, "[]"))
}

func isLoopbackText(host string) bool {
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

func isLoopback(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
