package buildnet

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

const (
	resolveTime = 15 * time.Second
	dialTime    = 15 * time.Second
)

// refusal is why a target is not connected to by decision, not by misfortune.
type refusal struct {
	why  string
	hint string // what whoever builds can do
}

func (r *refusal) Error() string { return r.why }

// allow decides about t.
func (n *Network) allow(t target) (rule, error) {
	r, ok := find(n.rules, t)
	if ip, err := netip.ParseAddr(t.host); err == nil {
		if why := reachable(ip, r.registry, n.own); why != "" {
			return rule{}, &refusal{why: t.String() + " is " + why}
		}
	}
	if !ok {
		return rule{}, &refusal{why: t.String() + " is not allowed in this build", hint: "allow it with --allow-host " + t.suggestion()}
	}
	return r, nil
}

// suggestion is how a rule for t is written.
func (t target) suggestion() string {
	if t.port == 80 || t.port == 443 {
		return t.host
	}
	return t.String()
}

// dial connects to t as r allows, by the host's own proxy if it has one for it.
func (n *Network) dial(ctx context.Context, t target, r rule) (net.Conn, error) {
	proxy, err := n.settings.proxyFor(t)
	if err != nil {
		return nil, err
	}
	if proxy != nil {
		return tunnel(ctx, proxy, t)
	}
	return n.dialDirect(ctx, t, r)
}

func (n *Network) dialDirect(ctx context.Context, t target, r rule) (net.Conn, error) {
	addrs, err := n.resolve(ctx, t, r)
	if err != nil {
		return nil, err
	}
	var first error
	for _, a := range addrs {
		attempt, cancel := context.WithTimeout(ctx, dialTime)
		conn, err := n.dialer(attempt, netip.AddrPortFrom(a, uint16(t.port)))
		cancel()
		if err == nil {
			return conn, nil
		}
		if first == nil {
			first = err
		}
	}
	return nil, fmt.Errorf("connect to %s: %w", t, first)
}

// resolve returns the addresses of t, all of them checked.
func (n *Network) resolve(ctx context.Context, t target, r rule) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	addrs := []netip.Addr{}
	if ip, err := netip.ParseAddr(t.host); err == nil {
		addrs = append(addrs, ip)
	} else if addrs, err = n.resolver(ctx, t.host); err != nil {
		return nil, fmt.Errorf("look up %s: %w", t.host, err)
	}
	if len(addrs) == 0 {
		return nil, errdefs.New(errdefs.ErrNotFound, "look up %s: it has no address", t.host)
	}
	for i, a := range addrs {
		if why := reachable(a, r.registry, n.own); why != "" {
			return nil, &refusal{why: fmt.Sprintf("%s is at %s, %s", t, a, why)}
		}
		addrs[i] = a.Unmap()
	}
	return addrs, nil
}

func systemDial(ctx context.Context, a netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", a.String())
}

func systemResolve(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// tunnel connects to t through an HTTP proxy of the host.
func tunnel(ctx context.Context, proxy *url.URL, t target) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	conn, err := dialProxy(ctx, proxy)
	if err != nil {
		return nil, fmt.Errorf("connect to the proxy of this host: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	reader, err := requestTunnel(conn, proxy, t)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("connect to %s by the proxy of this host: %w", t, err)
	}
	return &buffered{Conn: conn, r: reader}, nil
}

func requestTunnel(conn net.Conn, proxy *url.URL, t target) (*bufio.Reader, error) {
	req := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: t.String()}, Host: t.String(), Header: http.Header{}}
	if u := proxy.User; u != nil {
		password, _ := u.Password()
		req.Header.Set("Proxy-Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(u.Username()+":"+password)))
	}
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	reader := bufio.NewReader(conn)
	res, err := http.ReadResponse(reader, req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		return nil, errdefs.New(errdefs.ErrUnavailable, "it answered %q", res.Status)
	}
	return reader, nil
}

func dialProxy(ctx context.Context, proxy *url.URL) (net.Conn, error) {
	if proxy.Scheme == "https" {
		return new(tls.Dialer).DialContext(ctx, "tcp", proxyAddress(proxy))
	}
	return new(net.Dialer).DialContext(ctx, "tcp", proxyAddress(proxy))
}

// buffered is a connection of which some bytes were read ahead.
type buffered struct {
	net.Conn
	r *bufio.Reader
}

func (b *buffered) Read(p []byte) (int, error) { return b.r.Read(p) }

// CloseWrite ends one direction, if the connection can.
func (b *buffered) CloseWrite() error {
	if h, ok := b.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}
