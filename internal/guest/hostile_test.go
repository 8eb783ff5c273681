package guest

import (
	"bytes"
	"context"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// connPair makes two connected sockets.
func connPair(t testing.TB) (host, guest net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if conns[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	t.Cleanup(func() { conns[0].Close(); conns[1].Close() })
	return conns[0], conns[1]
}

// evilGuest answers the handshake, then does as act says with each frame.
func evilGuest(t testing.TB, conn net.Conn, act func(f agentwire.Frame)) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := agentwire.NewReader(conn)
		for {
			f, err := r.Next()
			if err != nil {
				return
			}
			if f.Type == agentwire.FrameHello {
				var h agentwire.Hello
				h.Decode(f.Payload)
				ack := agentwire.HelloAck{Nonce: h.Nonce, Version: agentwire.Version, AgentVersion: "evil"}
				conn.Write(agentwire.AppendFrame(nil, agentwire.FrameHelloAck, 0, ack.Append(nil)))
				continue
			}
			act(f)
		}
	}()
	t.Cleanup(func() { conn.Close(); <-done })
}

func evilClient(t testing.TB, opts Options, act func(conn net.Conn, f agentwire.Frame)) *Client {
	t.Helper()
	host, guest := connPair(t)
	evilGuest(t, guest, func(f agentwire.Frame) { act(guest, f) })
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	c, err := Connect(ctx, host, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func send(conn net.Conn, t agentwire.FrameType, id uint32, payload ...[]byte) {
	conn.Write(agentwire.AppendFrame(nil, t, id, payload...))
}

// TestEvilGuests has guests that break the protocol in each way: the call and the
// connection end as ErrGuest, soon and with bounded memory.
func TestEvilGuests(t *testing.T) {
	big := bytes.Repeat([]byte{'x'}, agentwire.ChunkSize)
	for name, act := range map[string]func(conn net.Conn, f agentwire.Frame){
		"garbage":            func(conn net.Conn, f agentwire.Frame) { conn.Write([]byte("HTTP/1.1 400 Bad Request\x00")) },
		"endless noise":      func(conn net.Conn, f agentwire.Frame) { flood(conn, big) },
		"reply to another":   func(conn net.Conn, f agentwire.Frame) { send(conn, agentwire.FrameReply, f.ID+1, []byte{0, 0}) },
		"short reply frame":  func(conn net.Conn, f agentwire.Frame) { send(conn, agentwire.FrameReply, f.ID, []byte{0}) },
		"broken message":     func(conn net.Conn, f agentwire.Frame) { send(conn, agentwire.FrameReply, f.ID, []byte{0, 0, 0xff}) },
		"broken error":       func(conn net.Conn, f agentwire.Frame) { send(conn, agentwire.FrameReply, f.ID, []byte{0, 1, 0xff}) },
		"a call to the host": func(conn net.Conn, f agentwire.Frame) { send(conn, agentwire.FrameCall, 1, []byte{0, 1}) },
		"a stream to the host": func(conn net.Conn, f agentwire.Frame) {
			send(conn, agentwire.FrameOpen, 9, []byte("\x00\x00\x01\x00http"))
		},
		"data of no stream": func(conn net.Conn, f agentwire.Frame) { send(conn, agentwire.FrameStreamData, 99, big) },
		"unknown frames":    func(conn net.Conn, f agentwire.Frame) { send(conn, 200, 1) },
		"unasked note":      func(conn net.Conn, f agentwire.Frame) { send(conn, agentwire.FrameNote, f.ID, []byte{0, 1}) },
		"endless reply": func(conn net.Conn, f agentwire.Frame) {
			flood(conn, agentwire.AppendFrame(nil, agentwire.FrameReply, f.ID, []byte{agentwire.FlagMore, 0}, big))
		},
		"endless empty reply": func(conn net.Conn, f agentwire.Frame) {
			flood(conn, agentwire.AppendFrame(nil, agentwire.FrameReply, f.ID, []byte{agentwire.FlagMore, 0}))
		},
		"hello answers without end": func(conn net.Conn, f agentwire.Frame) {
			ack := agentwire.HelloAck{Nonce: [16]byte{1}, Version: 1}
			flood(conn, agentwire.AppendFrame(nil, agentwire.FrameHelloAck, 0, ack.Append(nil)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := evilClient(t, Options{}, act)
			_, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"x"}, OutputLimit: 1000})
			wantClass(t, err, errdefs.ErrGuest)
		})
	}
}

// flood writes until the connection ends.
func flood(conn net.Conn, p []byte) {
	for {
		if _, err := conn.Write(p); err != nil {
			return
		}
	}
}

func TestGuestThatStopsReading(t *testing.T) {
	stop := make(chan struct{})
	defer close(stop)
	c := evilClient(t, Options{StallTimeout: 200 * time.Millisecond}, func(net.Conn, agentwire.Frame) { <-stop })
	_, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"cat"}, Stdin: make([]byte, 16<<20)})
	wantClass(t, err, errdefs.ErrGuest)
}

func TestGuestThatNeverAnswers(t *testing.T) {
	host, _ := connPair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := Connect(ctx, host, Options{HelloEvery: time.Millisecond})
	wantClass(t, err, context.DeadlineExceeded)

	c := evilClient(t, Options{}, func(net.Conn, agentwire.Frame) {})
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = c.Ping(ctx)
	wantClass(t, err, context.DeadlineExceeded)
	if c.Err() != nil {
		t.Fatalf("one late answer ended the connection: %v", c.Err())
	}
}

func TestAgentOfAnotherVersion(t *testing.T) {
	host, guest := connPair(t)
	go func() {
		f, err := agentwire.NewReader(guest).Next()
		if err != nil {
			return
		}
		var h agentwire.Hello
		h.Decode(f.Payload)
		ack := agentwire.HelloAck{Nonce: h.Nonce, Version: 99}
		guest.Write(agentwire.AppendFrame(nil, agentwire.FrameHelloAck, 0, ack.Append(nil)))
	}()
	_, err := Connect(testContext(t), host, Options{})
	wantClass(t, err, errdefs.ErrIncompatible)
}

// TestLyingGuest claims results that no honest agent makes.
func TestLyingGuest(t *testing.T) {
	for name, m := range map[string]agentwire.ExecResult{
		"too much output": {Stdout: make([]byte, 2000)},
		"exit code":       {ExitCode: -1},
	} {
		t.Run(name, func(t *testing.T) {
			c := evilClient(t, Options{}, func(conn net.Conn, f agentwire.Frame) {
				send(conn, agentwire.FrameReply, f.ID, m.Append([]byte{0, 0}))
			})
			_, err := c.Exec(testContext(t), agentwire.ExecRequest{Argv: []string{"x"}, OutputLimit: 1000})
			wantClass(t, err, errdefs.ErrGuest)
		})
	}
	t.Run("receipt before the clock", func(t *testing.T) {
		c := evilClient(t, Options{}, func(conn net.Conn, f agentwire.Frame) {
			r := agentwire.Receipt{Generation: 1}
			send(conn, agentwire.FrameReply, f.ID, r.Append([]byte{0, 0}))
		})
		_, err := c.VerdictFork(testContext(t), newIdentity(1))
		wantClass(t, err, errdefs.ErrGuest)
	})
	t.Run("clock", func(t *testing.T) {
		c := evilClient(t, Options{}, func(conn net.Conn, f agentwire.Frame) {
			m := agentwire.Clock{Wall: time.Unix(0, 1)}
			send(conn, agentwire.FrameNote, f.ID, m.Append([]byte{0, agentwire.NoteClocked}))
		})
		_, err := c.VerdictFork(testContext(t), newIdentity(1))
		wantClass(t, err, errdefs.ErrGuest)
	})
}

// FuzzClient feeds any bytes to a client with a call and a stream under way: no
// panic, no hang, and the connection ends with a class of ours.
func FuzzClient(f *testing.F) {
	pong := agentwire.Pong{AgentVersion: "1"}
	f.Add(agentwire.AppendFrame(nil, agentwire.FrameReply, 1, pong.Append([]byte{0, 0})))
	f.Add(agentwire.AppendFrame(nil, agentwire.FrameStreamData, 2, []byte("data")))
	f.Add(agentwire.AppendFrame(agentwire.AppendFrame(nil, agentwire.FrameWindow, 2, []byte{0, 1, 0, 0}), agentwire.FrameClose, 2, []byte("\x00")))
	f.Fuzz(func(t *testing.T, b []byte) {
		once := make(chan struct{}, 1)
		c := evilClient(t, Options{}, func(conn net.Conn, fr agentwire.Frame) {
			if fr.Type != agentwire.FrameOpen {
				return
			}
			select {
			case once <- struct{}{}:
				conn.Write(b)
				conn.Write([]byte{agentwire.Mark})
				conn.Close()
			default:
			}
		})
		ctx := context.Background()
		pinged := make(chan struct{})
		go func() {
			defer close(pinged)
			c.Ping(ctx)
		}()
		if s, err := c.OpenStream(ctx, "http"); err == nil {
			s.Read(make([]byte, 10))
			s.Close()
		}
		<-pinged
		<-c.Done()
	})
}

// FuzzFrames is FuzzClient with frames that are whole.
func FuzzFrames(f *testing.F) {
	f.Add([]byte("\x04\x01\x03\x00\x00\x02"))
	f.Add([]byte("\x0a\x02\x04\x00\x00\x01\x00\x09\x02\x01x\x0b\x02\x01\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var frames []byte
		for len(b) >= 3 {
			n := min(int(b[2]), len(b)-3)
			frames = agentwire.AppendFrame(frames, agentwire.FrameType(b[0]), uint32(b[1]), b[3:3+n])
			b = b[3+n:]
		}
		c := evilClient(t, Options{}, func(conn net.Conn, fr agentwire.Frame) {
			if fr.Type == agentwire.FrameCall {
				conn.Write(frames)
				conn.Close()
			}
		})
		c.Ping(context.Background())
		<-c.Done()
	})
}
