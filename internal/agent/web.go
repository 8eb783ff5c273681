package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/agentwire/link"
)

// accept takes a stream that the daemon opens.
func (s *session) accept(st *link.Stream) {
	kind := st.Kind()
	if kind == agentwire.StreamHTTP {
		st.Accept()
		s.agent.web.serve(st)
		return
	}
	serve := s.agent.buildStream(kind)
	if text, ok := strings.CutPrefix(kind, agentwire.StreamTCP); ok {
		if port, err := strconv.ParseUint(text, 10, 16); err == nil && port != 0 {
			serve = func(st *link.Stream) { s.agent.forward(st, int(port)) }
		}
	}
	if serve == nil {
		st.Refuse("unknown kind of stream")
		return
	}
	s.agent.calls.Add(1)
	go func() {
		defer s.agent.calls.Done()
		serve(st)
	}()
}

const dialTime = 10 * time.Second

// forward joins a stream with a port of the guest's loopback.
func (a *Agent) forward(st *link.Stream, port int) {
	ctx, cancel := context.WithTimeout(a.ctx, dialTime)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		st.Refuse("port " + strconv.Itoa(port) + " of the sandbox does not accept connections")
		return
	}
	st.Accept()
	join(a.ctx, st, conn)
}

// join carries bytes between a stream and a connection until both directions have
// ended or ctx has, and closes both.
func join(ctx context.Context, st *link.Stream, conn net.Conn) {
	defer conn.Close()
	defer st.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	up := make(chan struct{})
	go func() {
		defer close(up)
		pipe(conn, st)
	}()
	pipe(st, conn)
	<-up
}

// halfCloser is a connection of which one direction can end.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// pipe copies from src to dst until the end of src, which it passes on. An error
// ends both directions.
func pipe(dst, src net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, werr := dst.Write(buf[:n]); werr != nil {
				src.Close()
				return
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			if h, ok := dst.(halfCloser); ok {
				h.CloseWrite()
			}
			return
		default:
			dst.Close()
			return
		}
	}
}

// webServer is the agent's HTTP server, started by the first stream for it.
type webServer struct {
	handler func() http.Handler

	mu sync.Mutex
	// +checklocks:mu
	server *http.Server
	// +checklocks:mu
	conns chan net.Conn
	// +checklocks:mu
	done chan struct{}
	// +checklocks:mu
	closed bool
}

func (w *webServer) serve(conn net.Conn) {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		conn.Close()
		return
	}
	if w.server == nil {
		w.conns = make(chan net.Conn, 16)
		w.done = make(chan struct{})
		w.server = &http.Server{Handler: w.handler(), ReadHeaderTimeout: time.Minute}
		go func(srv *http.Server, l net.Listener, done chan struct{}) {
			defer close(done)
			srv.Serve(l)
		}(w.server, &streamListener{conns: w.conns, done: make(chan struct{})}, w.done)
	}
	conns := w.conns
	w.mu.Unlock()
	select {
	case conns <- conn:
	default:
		conn.Close() // more connections at once than the server takes up
	}
}

func (w *webServer) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.server != nil {
		w.server.Close()
		<-w.done
	}
}

// streamListener hands streams to the HTTP server.
type streamListener struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func (l *streamListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *streamListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *streamListener) Addr() net.Addr { return &net.UnixAddr{Name: "forkd-agent", Net: "unix"} }

func (a *Agent) healthHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}
