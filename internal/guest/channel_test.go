package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// lossyConn loses the first bytes written to it.
type lossyConn struct {
	net.Conn
	mu   sync.Mutex
	lose int // writes
}

func (c *lossyConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lose > 0 {
		c.lose--
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func TestLostHelloIsRepeated(t *testing.T) {
	rig := startAgent(t)
	c, err := Connect(testContext(t), &lossyConn{Conn: rig.dial(), lose: 2}, Options{HelloEvery: 5 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	mustPing(t, c)
}

func TestHalfFrameIsNeverExecuted(t *testing.T) {
	rig := startAgent(t)
	rig.connect()
	marker := t.TempDir() + "/ran"
	m := agentwire.ExecRequest{Argv: []string{"touch", marker}}
	frame := agentwire.AppendFrame(nil, agentwire.FrameCall, 1, m.Append([]byte{0, byte(agentwire.MethodExec)}))
	for cut := len(frame) - 2; cut > 0; cut -= 7 { // a frame that lacks only its mark is whole
		if _, err := rig.host.Write(frame[:cut]); err != nil {
			t.Fatal(err)
		}
		c := rig.connect()
		if res := mustExec(t, c, "test", "-e", marker); res.ExitCode != 1 {
			t.Fatalf("the first %d bytes of a call were executed", cut)
		}
	}
}

func TestReconnectDropsTheOldConnection(t *testing.T) {
	rig := startAgent(t)
	first := rig.connect()
	evalTo(t, first, "kept = 5", "")
	first.Close()
	// A large reply is half sent when the second connection comes.
	ctx, cancel := context.WithCancel(testContext(t))
	ended := make(chan struct{})
	conn := rig.dial()
	slow, err := Connect(ctx, &stallingConn{Conn: conn, after: 1 << 20, stop: ctx.Done()}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(ended)
		slow.Exec(ctx, agentwire.ExecRequest{Argv: []string{"head", "-c", "8M", "/dev/urandom"}})
	}()
	slow.conn.(*stallingConn).stalled(t)
	cancel()
	<-ended
	slow.Close()
	second := rig.connect()
	evalTo(t, second, "kept", "5")
	mustExec(t, second, "true")
}

// stallingConn stops reading after some bytes.
type stallingConn struct {
	net.Conn
	after int
	stop  <-chan struct{}
	once  sync.Once
	full  chan struct{}
	mu    sync.Mutex
}

func (c *stallingConn) stallChan() chan struct{} {
	c.once.Do(func() { c.full = make(chan struct{}) })
	return c.full
}

func (c *stallingConn) Read(p []byte) (int, error) {
	full := c.stallChan()
	if c.after <= 0 {
		c.mu.Lock()
		select {
		case <-full:
		default:
			close(full)
		}
		c.mu.Unlock()
		<-c.stop
		return 0, io.EOF
	}
	n, err := c.Conn.Read(p)
	c.after -= n
	return n, err
}

func (c *stallingConn) stalled(t *testing.T) {
	t.Helper()
	select {
	case <-c.stallChan():
	case <-testContext(t).Done():
		t.Fatal("the reply never came")
	}
}

func TestStreamToGuestPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() { // sends back what it gets, until the end of it
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				io.Copy(conn, conn)
				conn.(*net.TCPConn).CloseWrite()
			}()
		}
	}()
	c := newClient(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			conn, err := c.OpenPort(testContext(t), uint16(l.Addr().(*net.TCPAddr).Port))
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			want := bytes.Repeat([]byte{byte(i), 0, 1, 2, 3}, 300_000)
			go func() {
				conn.Write(want)
				conn.(interface{ CloseWrite() error }).CloseWrite()
			}()
			got, err := io.ReadAll(conn)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes back of %d: %v", len(got), len(want), err)
			}
		})
	}
	wg.Wait()
	mustPing(t, c)
}

func TestStreamErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	c := newClient(t)
	conn, err := c.OpenPort(testContext(t), uint16(port))
	if err != nil {
		t.Fatal(err)
	}
	conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := conn.Read(make([]byte, 1)); !isTimeout(err) {
		t.Fatalf("read past its deadline: %v", err)
	}
	// Nobody reads at the other end: the write stops at its window and deadline.
	conn.SetWriteDeadline(time.Now().Add(2 * time.Second))
	if n, err := conn.Write(make([]byte, 64<<20)); !isTimeout(err) || n == 0 {
		t.Fatalf("wrote %d: %v", n, err)
	}
	mustPing(t, c) // the stalled stream stalls only itself
	conn.Close()
	l.Close()
	_, err = c.OpenPort(testContext(t), uint16(port))
	wantClass(t, err, errdefs.ErrUnavailable)
	for _, kind := range []string{"tcp:0", "tcp:x", "tcp:70000", "file:/etc"} {
		_, err := c.OpenStream(testContext(t), kind)
		wantClass(t, err, errdefs.ErrUnavailable)
	}
	open, err := c.OpenStream(testContext(t), "http")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := open.Read(make([]byte, 1)); err == nil {
		t.Fatal("a stream outlived its connection")
	}
	wantClass(t, func() error { _, err := c.Ping(testContext(t)); return err }(), errdefs.ErrCanceled)
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func TestHTTP(t *testing.T) {
	c := newClient(t)
	for i := range 3 {
		resp, err := c.HTTPClient().Get("http://agent/health?" + strconv.Itoa(i))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusNoContent {
			t.Fatal(resp.Status)
		}
	}
}

func TestShutdownEndsTheAgent(t *testing.T) {
	rig := startAgent(t)
	c := rig.connect()
	evalTo(t, c, "1", "1")
	if err := c.Shutdown(testContext(t)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.Done():
	case <-testContext(t).Done():
		t.Fatal("the agent goes on")
	}
}

// lateConn returns from a write only when the other side has ended.
type lateConn struct {
	net.Conn
	late  atomic.Bool
	ended chan struct{}
	once  sync.Once
}

func (c *lateConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		c.once.Do(func() { close(c.ended) })
	}
	return n, err
}

func (c *lateConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if c.late.Load() {
		<-c.ended
	}
	return n, err
}

// TestAnswerBeforeTheEnd: an answer counts, although the agent that gave it ended before
// this side knew that its call was sent.
func TestAnswerBeforeTheEnd(t *testing.T) {
	rig := startAgent(t)
	conn := &lateConn{Conn: rig.dial(), ended: make(chan struct{})}
	c, err := Connect(testContext(t), conn, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	conn.late.Store(true)
	if err := c.Shutdown(testContext(t)); err != nil {
		t.Error(err)
	}
}

func TestManyCallsAtOnce(t *testing.T) {
	c := newClient(t)
	errs := make(chan error, 300)
	for i := range cap(errs) {
		go func() {
			res, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"echo", strconv.Itoa(i)}})
			if err == nil && string(res.Stdout) != strconv.Itoa(i)+"\n" {
				err = errors.New("got the output of another call: " + string(res.Stdout))
			}
			errs <- err
		}()
	}
	refused := 0
	for range cap(errs) {
		err := <-errs
		if errors.Is(err, errdefs.ErrResourceExhausted) {
			refused++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d of %d calls refused at once", refused, cap(errs))
	mustExec(t, c, "true")
}
