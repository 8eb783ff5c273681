package forkd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Where a daemon is looked for.
const (
	SystemSocket = "/var/lib/forkd/forkd.sock"
	DefaultURL   = "http://127.0.0.1:8889"
)

// Options say where the daemon is. The zero value finds it: $FORKD_URL, the
// user's socket ($XDG_DATA_HOME/forkd/forkd.sock), [SystemSocket], [DefaultURL].
type Options struct {
	// BaseURL is http://, https:// or unix:///path/to/socket.
	BaseURL string
	// Socket is the path of the daemon's unix socket; it wins over BaseURL.
	Socket string
	// Token is sent as bearer token; "" means $FORKD_TOKEN.
	Token string
	// Getenv replaces os.Getenv.
	Getenv func(string) string
}

// dialTimeout bounds connecting, not the answer: a fork or a build takes its time.
const dialTimeout = 5 * time.Second

// Client talks to one daemon.
type Client struct {
	base   string // without a trailing slash
	target string // as shown to people
	token  string
	http   *http.Client
	// denied is a socket that exists but may not be used, found while looking.
	denied string
}

// New returns a client. It looks at sockets to choose one, but an absent daemon is
// an error only of the calls.
func New(o Options) (*Client, error) {
	if o.Getenv == nil {
		o.Getenv = os.Getenv
	}
	if o.Token == "" {
		o.Token = o.Getenv("FORKD_TOKEN")
	}
	switch {
	case o.Socket != "":
		return newClient("unix://"+o.Socket, o.Token)
	case o.BaseURL != "":
		return newClient(o.BaseURL, o.Token)
	case o.Getenv("FORKD_URL") != "":
		return newClient(o.Getenv("FORKD_URL"), o.Token)
	}
	var denied string
	for _, path := range sockets(o.Getenv) {
		err := probe(path)
		if err == nil {
			return newClient("unix://"+path, o.Token)
		}
		if errors.Is(err, fs.ErrPermission) {
			denied = path
		}
	}
	c, err := newClient(DefaultURL, o.Token)
	if err != nil {
		return nil, err
	}
	c.denied = denied
	return c, nil
}

// sockets lists where daemons put their sockets, the user's own first.
func sockets(getenv func(string) string) []string {
	data := getenv("XDG_DATA_HOME")
	if data == "" && getenv("HOME") != "" {
		data = filepath.Join(getenv("HOME"), ".local", "share")
	}
	if data == "" || !filepath.IsAbs(data) {
		return []string{SystemSocket}
	}
	return []string{filepath.Join(data, "forkd", "forkd.sock"), SystemSocket}
}

// probe tells whether somebody listens on a socket.
func probe(path string) error {
	conn, err := net.DialTimeout("unix", path, dialTimeout)
	if err != nil {
		return err
	}
	return conn.Close()
}

func newClient(base, token string) (*Client, error) {
	u, err := url.Parse(base)
	if err != nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "daemon address %q: %w", base, err)
	}
	dialer := &net.Dialer{Timeout: dialTimeout}
	transport := &http.Transport{DialContext: dialer.DialContext, MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute}
	c := &Client{target: base, token: token, http: &http.Client{Transport: transport, CheckRedirect: noRedirect}}
	switch {
	case u.Scheme == "unix" && u.Path != "" && u.Host == "":
		c.base = "http://forkd"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", u.Path)
		}
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "":
		transport.Proxy = http.ProxyFromEnvironment
		c.base = strings.TrimRight(base, "/")
	default:
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "daemon address %q is not a URL of the daemon", base),
			"use http://HOST:PORT, https://HOST:PORT or unix:///PATH")
	}
	return c, nil
}

// noRedirect keeps the token from following a redirect to somebody else.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Target tells where the daemon is looked for.
func (c *Client) Target() string { return c.target }

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// connectError says what a failed request means.
func (c *Client) connectError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ended(ctx)
	}
	var op *net.OpError
	switch {
	case errors.Is(err, fs.ErrPermission) || (c.denied != "" && errors.As(err, &op) && op.Op == "dial"):
		path := c.denied
		if path == "" {
			path = strings.TrimPrefix(c.target, "unix://")
		}
		return deniedError(path)
	case errors.As(err, &op) && op.Op == "dial":
		return errdefs.WithHint(errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("%w answers at %s", ErrNoDaemon, c.target)),
			"start one with: forkd serve")
	}
	return errdefs.As(errdefs.ErrUnavailable, fmt.Errorf("talk to daemon at %s: %w", c.target, err))
}
