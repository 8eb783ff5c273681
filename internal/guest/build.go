package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// Opener opens streams to an agent: a [Client], or who stands for one.
type Opener interface {
	OpenStream(ctx context.Context, kind string) (net.Conn, error)
}

// stream is an open stream that ends with a context.
type stream struct {
	net.Conn
	stop func() bool
}

func open(ctx context.Context, o Opener, kind string) (*stream, error) {
	conn, err := openNew(ctx, o, kind)
	if err != nil {
		return nil, err
	}
	return &stream{Conn: conn, stop: context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })}, nil
}

func (s *stream) Close() error {
	s.stop()
	return s.Conn.Close()
}

func (s *stream) closeWrite() error {
	if h, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errdefs.New(errdefs.ErrInternal, "stream %T cannot end one direction", s.Conn)
}

// ended prefers the end of ctx over what it did to the stream.
func ended(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// Unpack unpacks a tar archive at the root of the guest's file system.
func Unpack(ctx context.Context, o Opener, archive io.Reader) error {
	s, err := open(ctx, o, agentwire.StreamFiles)
	if err != nil {
		return fmt.Errorf("copy files to guest: %w", err)
	}
	defer s.Close()
	if err := exchange(s, archive); err != nil {
		return fmt.Errorf("copy files to guest: %w", ended(ctx, err))
	}
	return nil
}

// exchange sends all of r and takes the answer. An answer that comes early is the
// reason why the sending failed.
func exchange(s *stream, r io.Reader) error {
	answered := make(chan error, 1)
	go func() {
		_, err := agentwire.ReadAnswer(s)
		if err != nil {
			_ = s.SetWriteDeadline(time.Unix(1, 0)) // nobody reads what is still to come
		}
		answered <- err
	}()
	_, sent := io.Copy(s, r)
	if sent == nil {
		sent = s.closeWrite()
	}
	if sent != nil {
		_ = s.SetReadDeadline(time.Now().Add(answerTime))
	}
	err := <-answered
	if sent != nil && (err == nil || errdefs.Class(err) == errdefs.ErrInternal) {
		return sent
	}
	return err
}

// answerTime is how long an agent that no longer reads may take to say why.
const answerTime = 5 * time.Second

// Build is the network of a build in a guest. Its owner closes it.
type Build struct {
	Proxy string // where programs of the guest find the proxy: host:port
	o     Opener
	s     net.Conn
}

// OpenBuild unpacks settings, a tar archive of files in [agentwire.BuildDir] and
// [agentwire.BuildCacheDir], in the guest and opens the proxy there. ErrUnsupported: the agent is too old.
func OpenBuild(ctx context.Context, o Opener, settings io.Reader) (*Build, error) {
	conn, err := openNew(ctx, o, agentwire.StreamBuild)
	if err != nil {
		return nil, fmt.Errorf("open network of the build: %w", err)
	}
	b := &Build{o: o, s: conn}
	if b.Proxy, err = b.begin(ctx, settings); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("open network of the build: %w", ended(ctx, err))
	}
	return b, nil
}

func (b *Build) begin(ctx context.Context, settings io.Reader) (string, error) {
	stop := context.AfterFunc(ctx, func() { b.s.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := io.Copy(b.s, settings); err != nil {
		return "", err
	}
	proxy, err := agentwire.ReadAnswer(b.s)
	if err != nil {
		return "", err
	}
	host, port, err := net.SplitHostPort(proxy)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host != "127.0.0.1" {
		return "", errdefs.New(errdefs.ErrGuest, "the agent names %.80q as its proxy", proxy)
	}
	return proxy, nil
}

// Accept waits for the next connection that a program of the guest makes to the proxy.
func (b *Build) Accept(ctx context.Context) (net.Conn, error) {
	return b.o.OpenStream(ctx, agentwire.StreamBuildConn)
}

// Close ends the network: when it returns without an error, the guest has removed
// all that belonged to it.
func (b *Build) Close(ctx context.Context) error {
	defer b.s.Close()
	s := &stream{Conn: b.s, stop: context.AfterFunc(ctx, func() { b.s.SetDeadline(time.Unix(1, 0)) })}
	defer s.stop()
	err := s.closeWrite()
	if err == nil {
		_, err = agentwire.ReadAnswer(s)
	}
	if err != nil {
		return fmt.Errorf("close network of the build: %w", ended(ctx, err))
	}
	return nil
}

// Started is a program that runs on by itself in a guest.
type Started struct {
	PID  int
	s    net.Conn
	exit chan int
}

// Start starts a program whose output goes to [agentwire.StartLog]. Timeout and
// OutputLimit of m do not count.
func Start(ctx context.Context, o Opener, m agentwire.ExecRequest) (*Started, error) {
	conn, err := openNew(ctx, o, agentwire.StreamStart)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", m.Argv[0], err)
	}
	p := &Started{s: conn, exit: make(chan int, 1)}
	if p.PID, err = p.begin(ctx, m); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("start %s: %w", m.Argv[0], ended(ctx, err))
	}
	go func() { // ends with the stream
		defer close(p.exit)
		if code, err := readNumber(conn); err == nil {
			p.exit <- code
		}
	}()
	return p, nil
}

func (p *Started) begin(ctx context.Context, m agentwire.ExecRequest) (int, error) {
	s := &stream{Conn: p.s, stop: context.AfterFunc(ctx, func() { p.s.SetDeadline(time.Unix(1, 0)) })}
	defer s.stop()
	if _, err := s.Write(m.Append(nil)); err != nil {
		return 0, err
	}
	if err := s.closeWrite(); err != nil {
		return 0, err
	}
	return readNumber(s)
}

func readNumber(r io.Reader) (int, error) {
	text, err := agentwire.ReadAnswer(r)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(text, 10, 31)
	if err != nil {
		return 0, errdefs.New(errdefs.ErrGuest, "the agent answers %.80q, not a number", text)
	}
	return int(n), nil
}

// Exited gives the exit code once the program has ended. It is closed without one
// when the connection ends before the program.
func (p *Started) Exited() <-chan int { return p.exit }

// Leave lets the program go on without being watched. It may be repeated.
func (p *Started) Leave() {
	_ = p.s.Close()
	for range p.exit { // joins the reader
	}
}

// StartLog returns what the started program has written from offset on, at most
// [agentwire.StartLogChunk] bytes.
func StartLog(ctx context.Context, o Opener, offset int64) ([]byte, error) {
	s, err := open(ctx, o, agentwire.StreamStartLog+strconv.FormatInt(offset, 10))
	if err != nil {
		return nil, fmt.Errorf("read log of the started program: %w", err)
	}
	defer s.Close()
	if err := s.closeWrite(); err != nil {
		return nil, fmt.Errorf("read log of the started program: %w", err)
	}
	out, err := io.ReadAll(io.LimitReader(s, agentwire.StartLogChunk+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read log of the started program: %w", ended(ctx, err))
	case len(out) > agentwire.StartLogChunk:
		return nil, errdefs.New(errdefs.ErrGuest, "read log of the started program: more than was asked for")
	}
	return out, nil
}

// openNew opens a stream of a kind that agents of old snapshots do not know.
func openNew(ctx context.Context, o Opener, kind string) (net.Conn, error) {
	conn, err := o.OpenStream(ctx, kind)
	living, ok := o.(interface{ Err() error })
	if err != nil && errors.Is(err, errdefs.ErrUnavailable) && ok && living.Err() == nil {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "the agent in this snapshot is too old: %v", err),
			"make the snapshot it comes from again")
	}
	return conn, err
}
