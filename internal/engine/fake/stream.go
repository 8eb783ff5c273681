package fake

import (
	"archive/tar"
	"context"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// OpenStream opens a stream of one of these kinds: inspect; files, whose content is then on
// the disk; start, of a command "live WORDS" or "end CODE WORDS", which prints its
// words; start-log; tcp, which is accepted on the port that a living program has
// as its first word. There is no network for builds.
func (a *Agent) OpenStream(ctx context.Context, kind string) (net.Conn, error) {
	var serve func(far *half)
	port, isPort := strings.CutPrefix(kind, agentwire.StreamTCP)
	offset, isLog := strings.CutPrefix(kind, agentwire.StreamStartLog)
	switch {
	case kind == agentwire.StreamFiles:
		serve = func(far *half) { _ = agentwire.WriteAnswer(far, "", a.unpack(far)) }
	case kind == agentwire.StreamInspect:
		serve = a.inspect
	case kind == agentwire.StreamStart:
		serve = a.start
	case isLog:
		serve = func(far *half) {
			log := a.disk(agentwire.StartLog)
			n, _ := strconv.Atoi(offset)
			_, _ = io.WriteString(far, log[min(n, len(log)):])
		}
	case isPort:
		if first, _, _ := strings.Cut(a.disk(agentwire.StartLog), " "); first != port {
			return nil, errdefs.New(errdefs.ErrUnavailable, "agent stream %s: nobody listens", kind)
		}
		serve = func(*half) {}
	default:
		return nil, errdefs.New(errdefs.ErrUnsupported, "agent stream %s: there is none in a fake guest", kind)
	}
	when := thawed
	if kind == agentwire.StreamFiles || kind == agentwire.StreamInspect {
		when = anytime // the agent itself writes and reads them
	}
	if err := a.call(ctx, "stream", when, func(*content) error { return nil }); err != nil {
		return nil, err
	}
	near, far := newHalves()
	go func() { // ends with the stream or the connection
		serve(far)
		_ = far.CloseWrite()
		_, _ = io.Copy(io.Discard, far.r)
	}()
	context.AfterFunc(a.c.context(), func() { _ = near.Close() })
	return near, nil
}

// context ends with the connection.
func (c *conn) context() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-c.done
		cancel()
	}()
	return ctx
}

func (a *Agent) disk(path string) string {
	a.c.p.mu.Lock()
	defer a.c.p.mu.Unlock()
	return a.c.p.content.Disk[path]
}

func (a *Agent) setDisk(path, text string) {
	a.c.p.mu.Lock()
	defer a.c.p.mu.Unlock()
	a.c.p.content.Disk[path] = text
}

func (a *Agent) unpack(r io.Reader) error {
	archive := tar.NewReader(r)
	for {
		h, err := archive.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return errdefs.As(errdefs.ErrInvalid, err)
		}
		text, err := io.ReadAll(archive)
		if err != nil {
			return errdefs.As(errdefs.ErrInvalid, err)
		}
		a.setDisk("/"+h.Name, string(text))
	}
}

func (a *Agent) start(far *half) {
	var m agentwire.ExecRequest
	body, err := io.ReadAll(far)
	if err == nil {
		err = m.Decode(body)
	}
	words := []string{}
	if err == nil {
		words = strings.Fields(m.Argv[len(m.Argv)-1])
	}
	if len(words) == 0 || words[0] != "live" && words[0] != "end" {
		_ = agentwire.WriteAnswer(far, "", errdefs.New(errdefs.ErrNotFound, "there is no such program"))
		return
	}
	code := 0
	if words[0] == "end" {
		code, _ = strconv.Atoi(words[1])
		words = words[1:]
	}
	a.setDisk(agentwire.StartLog, strings.Join(words[1:], " ")+"\n")
	_ = agentwire.WriteAnswer(far, "7", nil)
	if code != 0 {
		_ = agentwire.WriteAnswer(far, strconv.Itoa(code), nil)
		return
	}
	<-far.closed()
}

// half is one end of a stream whose directions end separately.
type half struct {
	r    *io.PipeReader
	w    *io.PipeWriter
	done chan struct{} // closed with the near end
	end  func()
}

func newHalves() (near, far *half) {
	r1, w1 := io.Pipe()
	r2, w2 := io.Pipe()
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	context.AfterFunc(ctx, func() { close(done) })
	return &half{r: r1, w: w2, done: done, end: cancel}, &half{r: r2, w: w1, done: done, end: cancel}
}

func (h *half) closed() <-chan struct{}     { return h.done }
func (h *half) Read(p []byte) (int, error)  { return h.r.Read(p) }
func (h *half) Write(p []byte) (int, error) { return h.w.Write(p) }

// CloseWrite ends one direction.
func (h *half) CloseWrite() error { return h.w.Close() }

// Close ends both.
func (h *half) Close() error {
	h.end()
	_ = h.r.CloseWithError(net.ErrClosed)
	return h.w.CloseWithError(net.ErrClosed)
}

func (h *half) LocalAddr() net.Addr              { return &net.UnixAddr{Name: "fake", Net: "unix"} }
func (h *half) RemoteAddr() net.Addr             { return h.LocalAddr() }
func (h *half) SetReadDeadline(time.Time) error  { return nil }
func (h *half) SetWriteDeadline(time.Time) error { return nil }

// SetDeadline ends the stream if the time is over: that is what contexts need.
func (h *half) SetDeadline(t time.Time) error {
	if !t.IsZero() && time.Until(t) <= 0 {
		return h.Close()
	}
	return nil
}
