package vmmhost

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmmwire"
)

// dial returns a connection to a process that behaves as serve says.
func dial(t *testing.T, serve func(c *net.UnixConn)) (*Conn, error) {
	t.Helper()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		if c, err := l.AcceptUnix(); err == nil {
			defer c.Close()
			serve(c)
		}
	}()
	c, err := net.DialUnix("unixpacket", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	conn, err := NewConn(ctx, c)
	if err == nil {
		t.Cleanup(func() { conn.Close() })
	}
	return conn, err
}

func packet(seq uint32, m vmmwire.Message) []byte {
	b, err := vmmwire.Encode(seq, m)
	if err != nil {
		panic(err)
	}
	return b
}

var hello = packet(0, &vmmwire.Hello{Version: vmmwire.Version, State: vmmwire.StateBlank})

// TestMisbehavingProcess: whatever a process does on its socket, a call ends with an error.
func TestMisbehavingProcess(t *testing.T) {
	hang := make(chan struct{})
	defer close(hang)
	for name, serve := range map[string]func(c *net.UnixConn){
		"says nothing":        func(*net.UnixConn) { <-hang },
		"hangs up":            func(*net.UnixConn) {},
		"says garbage":        func(c *net.UnixConn) { _, _ = c.Write([]byte("hello")); <-hang },
		"says much":           func(c *net.UnixConn) { _, _ = c.Write(make([]byte, vmmwire.MaxMessage+100)); <-hang },
		"speaks another":      func(c *net.UnixConn) { _, _ = c.Write(packet(0, &vmmwire.Hello{Version: 99, State: 1})); <-hang },
		"answers before":      func(c *net.UnixConn) { _, _ = c.Write(packet(1, &vmmwire.Simple{Of: vmmwire.KindDone})); <-hang },
		"sends an empty word": func(c *net.UnixConn) { _, _ = c.Write(nil); <-hang },
	} {
		if _, err := dial(t, serve); err == nil {
			t.Errorf("a process that %s is greeted", name)
		}
	}
	read := func(c *net.UnixConn) { _, _ = c.Read(make([]byte, vmmwire.MaxMessage)) }
	for name, answer := range map[string]func(c *net.UnixConn){
		"never":           func(*net.UnixConn) { <-hang },
		"with the end":    func(*net.UnixConn) {},
		"with garbage":    func(c *net.UnixConn) { _, _ = c.Write([]byte{1, 2, 3}); <-hang },
		"another request": func(c *net.UnixConn) { _, _ = c.Write(packet(77, &vmmwire.Simple{Of: vmmwire.KindDone})); <-hang },
		"with a request":  func(c *net.UnixConn) { _, _ = c.Write(packet(1, &vmmwire.Simple{Of: vmmwire.KindPause})); <-hang },
		"with a failure": func(c *net.UnixConn) {
			_, _ = c.Write(packet(1, &vmmwire.Failed{Code: "no such code", Text: "x"}))
			<-hang
		},
		"for ever": func(c *net.UnixConn) {
			for {
				if _, err := c.Write(packet(5, &vmmwire.Ended{Reason: "again"})); err != nil {
					return
				}
			}
		},
	} {
		c, err := dial(t, func(s *net.UnixConn) { _, _ = s.Write(hello); read(s); answer(s) })
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if err := c.Do(ctx, &vmmwire.Simple{Of: vmmwire.KindStats}); err == nil {
			t.Errorf("a process that answers %s did what it was asked for", name)
		}
		cancel()
	}
}

func TestEndIsTold(t *testing.T) {
	c, err := dial(t, func(s *net.UnixConn) {
		_, _ = s.Write(hello)
		_, _ = s.Write(packet(0, &vmmwire.Ended{Reason: "triple fault"}))
	})
	if err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if e := c.Ended(); e == nil || e.Reason != "triple fault" {
		t.Errorf("%+v", e)
	}
	if err := c.Do(t.Context(), &vmmwire.Simple{Of: vmmwire.KindPause}); !errors.Is(err, errdefs.ErrGuest) {
		t.Errorf("%v", err)
	}
}
