package buildnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"time"
)

const (
	maxConns      = 64 // of the guest at a time
	maxHeader     = 64 << 10
	headerTime    = 60 * time.Second // an emulated guest is slow
	idleTime      = 2 * time.Minute
	answerTime    = 5 * time.Minute // to the header of a registry's answer
	serverWaiting = 2               // streams that wait for a connection of the guest
)

// Serve takes connections from accept and proxies what comes on them until ctx
// ends or accept fails. All connections are closed when it returns.
func (n *Network) Serve(ctx context.Context, accept func(context.Context) (net.Conn, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := newListener(ctx, accept)
	srv := &http.Server{
		Handler: http.HandlerFunc(n.handle), ReadHeaderTimeout: headerTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeader,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    log.New(io.Discard, "", 0), // the guest's mistakes are its own
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	err := srv.Serve(l)
	cancel()
	stop()
	_ = srv.Close()
	l.wait()
	n.mu.Lock()
	n.over = true
	n.mu.Unlock()
	n.handlers.Wait()
	n.plain.CloseIdleConnections()
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// listener gives the connections of a guest to the HTTP server.
type listener struct {
	ctx   context.Context
	ready chan net.Conn
	fail  chan error
	slots chan struct{}
	group sync.WaitGroup // acceptors and open connections
}

func newListener(ctx context.Context, accept func(context.Context) (net.Conn, error)) *listener {
	l := &listener{ctx: ctx, ready: make(chan net.Conn), fail: make(chan error, serverWaiting), slots: make(chan struct{}, maxConns)}
	for range serverWaiting {
		l.group.Go(func() { l.take(accept) })
	}
	return l
}

func (l *listener) take(accept func(context.Context) (net.Conn, error)) {
	for {
		select {
		case l.slots <- struct{}{}:
		case <-l.ctx.Done():
			return
		}
		conn, err := accept(l.ctx)
		if err != nil {
			l.fail <- err
			return
		}
		l.group.Add(1)
		tracked := &trackedConn{Conn: conn, gone: func() {
			<-l.slots
			l.group.Done()
		}}
		select {
		case l.ready <- tracked:
		case <-l.ctx.Done():
			_ = tracked.Close()
			return
		}
	}
}

// wait joins what was started. The listener's context has ended.
func (l *listener) wait() { l.group.Wait() }

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case err := <-l.fail:
		return nil, err
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener; the context ends it.
func (l *listener) Close() error { return nil }

// Addr implements net.Listener.
func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: "build", Net: "unix"} }

// trackedConn says once when it was closed.
type trackedConn struct {
	net.Conn
	once sync.Once
	gone func()
}

// Close implements net.Conn.
func (c *trackedConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(c.gone)
	return err
}

// CloseWrite ends one direction, if the connection can.
func (c *trackedConn) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (n *Network) handle(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	if n.over {
		n.mu.Unlock()
		return
	}
	n.handlers.Add(1)
	n.mu.Unlock()
	defer n.handlers.Done()
	switch {
	case r.Method == http.MethodConnect:
		n.connect(w, r)
	case r.URL.Scheme == "http" && r.URL.Host != "":
		n.forward(w, r)
	default:
		http.Error(w, "this is the proxy of a forkd build: it takes CONNECT and requests with a whole http:// address", http.StatusBadRequest)
	}
}

// connect serves a tunnel.
func (n *Network) connect(w http.ResponseWriter, r *http.Request) {
	begin := time.Now()
	c := Connection{Host: shown(r.Host)}
	defer func() {
		c.Duration = time.Since(begin)
		n.ended(c)
	}()
	t, ok := parseTarget(r.Host, 443)
	if !ok {
		n.refuse(w, http.StatusBadRequest, &c, c.Host+" is no host and port")
		return
	}
	c.Host = t.String()
	far, err := n.reach(r.Context(), t)
	if err != nil {
		n.explain(w, err, &c)
		return
	}
	defer far.Close()
	near, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		c.Failed = err.Error()
		return
	}
	defer near.Close()
	if _, err := io.WriteString(near, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		c.Failed = err.Error()
		return
	}
	n.count(1, 1, 0, 0)
	defer n.count(0, -1, 0, 0)
	c.Sent, c.Received = n.carry(r.Context(), &buffered{Conn: near, r: buf.Reader}, far)
}

// reach checks t and connects to it.
func (n *Network) reach(ctx context.Context, t target) (net.Conn, error) {
	r, err := n.allow(t)
	if err != nil {
		return nil, err
	}
	return n.dial(ctx, t, r)
}

// explain answers that a target was refused or cannot be reached.
func (n *Network) explain(w http.ResponseWriter, err error, c *Connection) {
	var no *refusal
	if errors.As(err, &no) {
		why := no.why
		if no.hint != "" {
			why += ": " + no.hint
		}
		n.refuse(w, http.StatusForbidden, c, why)
		return
	}
	c.Failed = err.Error()
	deny(w, http.StatusBadGateway, "forkd cannot reach "+c.Host)
}

// deny answers with the reason also in the status line, since that is all that
// many clients show of a refused tunnel.
func deny(w http.ResponseWriter, status int, why string) {
	conn, buf, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, why, status)
		return
	}
	defer conn.Close()
	why = shownLine(why)
	fmt.Fprintf(buf, "HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s\n", status, why, len(why)+1, why)
	_ = buf.Flush() // the guest may be gone
}

func shownLine(s string) string {
	out := []byte(s)
	for i, b := range out {
		if b < ' ' || b >= 0x7f {
			out[i] = '?'
		}
	}
	return string(out)
}

// carry copies in both directions until both have ended.
func (n *Network) carry(ctx context.Context, near, far net.Conn) (sent, received int64) {
	stop := context.AfterFunc(ctx, func() {
		_ = near.Close()
		_ = far.Close()
	})
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		sent = n.copyHalf(far, near, func(k int64) { n.count(0, 0, k, 0) })
	}()
	received = n.copyHalf(near, far, func(k int64) { n.count(0, 0, 0, k) })
	<-done
	return sent, received
}

// copyHalf copies from src to the end and passes that on; an error ends both.
func (n *Network) copyHalf(dst, src net.Conn, count func(int64)) (total int64) {
	buf := make([]byte, 32<<10)
	for {
		k, err := src.Read(buf)
		if k > 0 {
			total += int64(k)
			count(int64(k))
			if _, werr := dst.Write(buf[:k]); werr != nil {
				_ = src.Close()
				return total
			}
		}
		if err == nil {
			continue
		}
		half, ok := dst.(interface{ CloseWrite() error })
		if !errors.Is(err, io.EOF) || !ok || half.CloseWrite() != nil {
			_ = dst.Close()
		}
		return total
	}
}

// forward serves a plain request.
func (n *Network) forward(w http.ResponseWriter, r *http.Request) {
	begin := time.Now()
	c := Connection{Host: shown(r.URL.Host)}
	defer func() {
		c.Duration = time.Since(begin)
		n.ended(c)
	}()
	t, ok := parseTarget(r.URL.Host, 80)
	if !ok {
		n.refuse(w, http.StatusBadRequest, &c, c.Host+" is no host and port")
		return
	}
	c.Host = t.String()
	if _, err := n.allow(t); err != nil {
		n.explain(w, err, &c)
		return
	}
	n.count(1, 1, 0, 0)
	defer n.count(0, -1, 0, 0)
	body := &meter{n: n}
	r.Body = &countedBody{ReadCloser: r.Body, count: func(k int64) { c.Sent += k; n.count(0, 0, k, 0) }}
	proxy := &httputil.ReverseProxy{
		Transport: n.plain,
		ErrorLog:  log.New(io.Discard, "", 0),
		Rewrite: func(p *httputil.ProxyRequest) {
			// Only the address that was checked says where it goes.
			p.Out.URL = &url.URL{Scheme: "http", Host: t.String(), Path: p.In.URL.Path, RawPath: p.In.URL.RawPath, RawQuery: p.In.URL.RawQuery}
			p.Out.Host = p.In.URL.Host
			p.Out.Header.Del("Upgrade")
			p.Out.Header.Del("Connection")
		},
		ModifyResponse: func(res *http.Response) error {
			body.ReadCloser = res.Body
			res.Body = body
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) { n.explain(w, err, &c) },
	}
	proxy.ServeHTTP(w, r)
	c.Received = body.bytes
}

// newTransport is for plain requests. Its dialer checks addresses as for tunnels.
func (n *Network) newTransport() *http.Transport {
	return &http.Transport{
		Proxy: func(r *http.Request) (*url.URL, error) {
			t, ok := parseTarget(r.URL.Host, 80)
			if !ok {
				return nil, errClosed()
			}
			return n.settings.proxyFor(t)
		},
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if n.settings.isProxy(address) {
				return new(net.Dialer).DialContext(ctx, network, address)
			}
			t, ok := parseTarget(address, 0)
			if !ok {
				return nil, errClosed()
			}
			r, err := n.allow(t)
			if err != nil {
				return nil, err
			}
			return n.dialDirect(ctx, t, r)
		},
		DisableCompression: true, MaxIdleConnsPerHost: 4, MaxConnsPerHost: maxConns, IdleConnTimeout: idleTime,
		ResponseHeaderTimeout: answerTime, MaxResponseHeaderBytes: 1 << 20,
	}
}

// meter counts the body of an answer.
type meter struct {
	io.ReadCloser
	n     *Network
	bytes int64
}

func (m *meter) Read(p []byte) (int, error) {
	k, err := m.ReadCloser.Read(p)
	m.bytes += int64(k)
	m.n.count(0, 0, 0, int64(k))
	return k, err
}

type countedBody struct {
	io.ReadCloser
	count func(int64)
}

func (b *countedBody) Read(p []byte) (int, error) {
	k, err := b.ReadCloser.Read(p)
	b.count(int64(k))
	return k, err
}
