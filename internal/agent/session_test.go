package agent

import (
	"context"
	"os"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
)

// silentSession is a session on a channel whose other end takes everything, with
// methods that only echo.
func silentSession(t testing.TB) *session {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close(); null.Close() })
	ch, err := NewChannel(r, w, Ending)
	if err != nil {
		t.Fatal(err)
	}
	go func() { // ends with the pipe
		buf := make([]byte, 64<<10)
		for {
			if _, err := r.Read(buf); err != nil {
				return
			}
		}
	}()
	a := &Agent{cfg: Config{Channel: ch, Log: func(string) {}}, ctx: context.Background()}
	a.methods = func(_ context.Context, c *call) (answer, error) { return oneBody(c.body), nil }
	s := newSession(a, [16]byte{})
	t.Cleanup(func() { s.end(); a.calls.Wait() })
	return s
}

// FuzzSession feeds frames of any content to a session: it must not panic, hang
// or hold more than MaxRequest of them.
func FuzzSession(f *testing.F) {
	f.Add([]byte("\x03\x01\x02\x00\x01ab"))
	f.Add([]byte("\x03\x01\x03\x01\x01a\x03\x01\x03\x00\x01b"))
	f.Add([]byte("\x08\x05\x08\x00\x00\x10\x00tcp:"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := silentSession(t)
		for len(b) >= 3 {
			typ, id, n := agentwire.FrameType(b[0]), uint32(b[1]), int(b[2])
			n = min(n, len(b)-3)
			payload := b[3 : 3+n]
			b = b[3+n:]
			if typ == agentwire.FrameOpen { // would dial ports of this machine
				continue
			}
			if err := s.handle(agentwire.Frame{Type: typ, ID: id, Payload: payload}); err != nil {
				return
			}
		}
		if s.incoming < 0 || s.incoming > agentwire.MaxRequest {
			t.Fatalf("%d bytes of incomplete calls", s.incoming)
		}
	})
}

func TestCallsAreBounded(t *testing.T) {
	s := silentSession(t)
	part := make([]byte, 2+agentwire.ChunkSize)
	part[0] = agentwire.FlagMore
	var err error
	for i := 0; i*agentwire.ChunkSize <= agentwire.MaxRequest+agentwire.ChunkSize && err == nil; i++ {
		err = s.handle(agentwire.Frame{Type: agentwire.FrameCall, ID: uint32(i % 5), Payload: part})
	}
	if err == nil {
		t.Fatal("endless bodies were taken")
	}
}

// FuzzAnswers feeds bytes to the parser of runner answers.
func FuzzAnswers(f *testing.F) {
	f.Add([]byte("\x05\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x0042abc"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < replyHead {
			return
		}
		a, ok := parseReply(b[:replyHead], b[replyHead:])
		if ok && strings.Join(a.texts[:], "") != string(b[replyHead:]) {
			t.Fatalf("%q became %q", b, a.texts)
		}
	})
}

func TestHostsWithout(t *testing.T) {
	got := hostsWithout("127.0.0.1 localhost\n127.0.1.1 old\n10.0.0.1 x")
	if want := "127.0.0.1 localhost\n10.0.0.1 x\n"; got != want {
		t.Fatalf("%q, want %q", got, want)
	}
}
