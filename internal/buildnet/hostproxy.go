package buildnet

import (
	"cmp"
	"net"
	"net/netip"
	"net/url"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// hostProxy is the proxy that the host's environment names, as curl, pip and Go
// understand the variables.
type hostProxy struct {
	plain, secure string
	exceptions    []string
}

func newHostProxy(getenv func(string) string) hostProxy {
	get := func(name string) string { return cmp.Or(getenv(strings.ToLower(name)), getenv(name)) }
	return hostProxy{
		plain: cmp.Or(get("HTTP_PROXY"), get("ALL_PROXY")), secure: cmp.Or(get("HTTPS_PROXY"), get("ALL_PROXY")),
		exceptions: strings.FieldsFunc(strings.ToLower(get("NO_PROXY")), func(r rune) bool { return r == ',' || r == ' ' }),
	}
}

// find returns the proxy for t, or nil.
func (p hostProxy) find(t target) (*url.URL, error) {
	address := p.secure
	if t.port == 80 {
		address = p.plain
	}
	if address == "" || p.excepts(t) {
		return nil, nil
	}
	return parseProxy(address)
}

// parseProxy reads URL or HOST:PORT. The error does not repeat what may hold a password.
func parseProxy(address string) (*url.URL, error) {
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "the proxy that this host is configured for is no http:// or https:// address"),
			"check HTTPS_PROXY, HTTP_PROXY and ALL_PROXY of the daemon")
	}
	return u, nil
}

func (p hostProxy) excepts(t target) bool {
	ip, ipErr := netip.ParseAddr(t.host)
	for _, e := range p.exceptions {
		if e == "*" {
			return true
		}
		if net, err := netip.ParsePrefix(e); err == nil && ipErr == nil && net.Contains(ip) {
			return true
		}
		host := e
		if h, port, err := net.SplitHostPort(e); err == nil {
			if !strings.HasSuffix(t.String(), ":"+port) {
				continue
			}
			host = h
		}
		host = strings.TrimPrefix(strings.TrimPrefix(host, "*"), ".")
		if t.host == host || ipErr != nil && strings.HasSuffix(t.host, "."+host) {
			return true
		}
	}
	return false
}

// address is where a proxy is dialed.
func proxyAddress(u *url.URL) string {
	return net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), map[string]string{"http": "80", "https": "443"}[u.Scheme]))
}
