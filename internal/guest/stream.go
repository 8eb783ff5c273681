package guest

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// OpenStream opens a byte stream to the guest: "http" is the agent's HTTP server,
// "tcp:PORT" a port of the guest's loopback. The caller closes it.
func (c *Client) OpenStream(ctx context.Context, kind string) (net.Conn, error) {
	if kind == "" || len(kind) > 200 {
		return nil, errdefs.New(errdefs.ErrInvalid, "open stream: kind %.40q is not 1 to 200 bytes", kind)
	}
	c.mu.Lock()
	id := c.freeIDLocked()
	c.mu.Unlock()
	s, err := c.link.Open(ctx, id, kind)
	if err != nil {
		return nil, fmt.Errorf("open stream %s to guest: %w", kind, err)
	}
	return s, nil
}

// OpenPort opens a connection to a port of the guest's loopback.
func (c *Client) OpenPort(ctx context.Context, port uint16) (net.Conn, error) {
	return c.OpenStream(ctx, "tcp:"+strconv.Itoa(int(port)))
}

// HTTPClient returns a client whose every request goes to the agent's own HTTP
// server, whatever its host is. It ends with c.
func (c *Client) HTTPClient() *http.Client { return c.web }

func newHTTPClient(c *Client) *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return c.OpenStream(ctx, "http") },
			DisableCompression:     true,
			MaxIdleConns:           4,
			IdleConnTimeout:        time.Minute,
			MaxResponseHeaderBytes: 64 << 10,
		},
		// A hostile guest must not send the daemon anywhere else.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}
