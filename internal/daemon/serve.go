package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/cli"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/frontend/rest"
)

// defaultBind is where the API listens if nothing else is said.
const defaultBind = "127.0.0.1:8889"

// Options are the settings of one daemon.
type Options struct {
	cli.ServeOptions
	Version string
	Log     io.Writer
	// Private, if set, makes it a private daemon: it ends when Lifeline does.
	Private  bool
	Lifeline io.Reader
	// Ready is called with the socket's path once requests are served, Stopping when
	// no more will be. Both may be nil.
	Ready    func(socket string)
	Stopping func()
}

// DefaultDataDir is /var/lib/forkd for root, else below XDG_DATA_HOME.
func DefaultDataDir(getenv func(string) string) string {
	if os.Geteuid() == 0 {
		return "/var/lib/forkd"
	}
	if dir := getenv("XDG_DATA_HOME"); dir != "" {
		return filepath.Join(dir, "forkd")
	}
	return filepath.Join(getenv("HOME"), ".local", "share", "forkd")
}

// Serve runs a daemon until ctx ends. Sandboxes go on then, unless it is private.
func Serve(ctx context.Context, o Options) error {
	// Whatever the parent left open must not reach a machine's process.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("serve: mark descriptors: %w", err)
	}
	if err := raiseFileLimit(); err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	outliveReaders()
	log := slog.New(slog.NewTextHandler(o.Log, &slog.HandlerOptions{Level: o.LogLevel}))
	token, err := readToken(o.TokenFile)
	if err != nil {
		return err
	}
	if err := checkBinds(o.Bind, token); err != nil {
		return err
	}
	if o.Private {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		go func() { // ends with the process: a private daemon has nothing else to read
			_, _ = io.Copy(io.Discard, o.Lifeline)
			cancel()
		}()
	}
	p, err := openParts(ctx, o, log)
	if err != nil {
		return err
	}
	err = p.serve(ctx, o, token, log)
	closeCtx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	return errors.Join(err, p.close(closeCtx))
}

// outliveReaders keeps the daemon from being killed in the middle of its work when
// the reader of its log goes away, as that of a private daemon does when its
// command is killed. Ignoring the signal would be inherited by the programs it runs.
func outliveReaders() { signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE) }

// serve listens and answers until ctx ends.
func (p *parts) serve(ctx context.Context, o Options, token string, log *slog.Logger) error {
	listeners, socket, err := listen(o)
	if err != nil {
		return err
	}
	defer os.Remove(socket)
	handler, err := rest.New(rest.Config{
		Service: p.service, Token: token, AllowedHosts: o.AllowedHosts, Log: log, Version: o.Version, Engine: p.engine.Name(), Closing: ctx,
	})
	if err != nil {
		return err
	}
	srv := newServer(handler, log)
	errs := make(chan error, len(listeners))
	for _, l := range listeners {
		log.Info("listening", "address", l.Addr().String())
		go func() { errs <- srv.Serve(l) }() // joined below
	}
	prepareCtx, cancelPrepare := context.WithCancel(ctx)
	prepared := make(chan struct{})
	go func() {
		defer close(prepared)
		p.prepare(prepareCtx, o.Prepare, log)
	}()
	if o.Ready != nil {
		o.Ready(socket)
	}
	var failed error
	select {
	case <-ctx.Done():
		log.Info("shutting down")
	case failed = <-errs:
		errs <- failed
	}
	if o.Stopping != nil {
		o.Stopping()
	}
	cancelPrepare()
	<-prepared
	shutdown, cancel := context.WithTimeout(context.Background(), shutdownPatience)
	defer cancel()
	err = srv.Shutdown(shutdown)
	if errors.Is(err, context.DeadlineExceeded) {
		err = srv.Close() // the requests that are left are cancelled
	}
	for range listeners {
		<-errs
	}
	if failed != nil {
		err = errors.Join(fmt.Errorf("serve: %w", failed), err)
	}
	return err
}

// shutdownPatience is how long requests under way may take to end by themselves.
const shutdownPatience = 10 * time.Second

func (p *parts) prepare(ctx context.Context, names []string, log *slog.Logger) {
	for _, name := range names {
		last := ""
		tell := func(step string, _ float64) {
			if step != last {
				log.Info("preparing", "snapshot", name, "step", step)
				last = step
			}
		}
		if err := p.service.Prepare(ctx, name, tell); err != nil {
			log.Error("prepare", "snapshot", name, "error", err)
			continue
		}
		log.Info("prepared", "snapshot", name)
	}
}

// listen opens the unix socket and the TCP addresses.
func listen(o Options) ([]net.Listener, string, error) {
	name, other := "forkd.sock", "private.sock"
	binds := o.Bind
	if o.Private {
		name, other, binds = other, name, nil
	} else if len(binds) == 0 {
		binds = []string{defaultBind}
	}
	// The data directory is locked: what a killed daemon left is dead.
	if err := os.Remove(filepath.Join(o.DataDir, other)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, "", fmt.Errorf("remove old socket: %w", err)
	}
	socket := filepath.Join(o.DataDir, name)
	l, err := listenSocket(socket)
	if err != nil {
		return nil, "", err
	}
	listeners := []net.Listener{l}
	for _, b := range binds {
		l, err := net.Listen("tcp", b)
		if err != nil {
			for _, open := range listeners {
				_ = open.Close()
			}
			return nil, "", errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "listen on %s: %v", b, err), "choose another with --bind")
		}
		listeners = append(listeners, l)
	}
	return listeners, socket, nil
}

// checkBinds refuses to be open to the network without a token.
func checkBinds(binds []string, token string) error {
	for _, b := range binds {
		host, _, err := net.SplitHostPort(b)
		if err != nil {
			return errdefs.New(errdefs.ErrInvalid, "--bind %.80q is not host:port", b)
		}
		ip := net.ParseIP(host)
		if token == "" && host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "--bind %s is not loopback, and there is no token", b),
				"give one with --token-file")
		}
	}
	return nil
}

// minTokenBytes is the shortest token that is accepted.
const minTokenBytes = 16

func readToken(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", errdefs.As(errdefs.ErrInvalid, fmt.Errorf("read token: %w", err))
	}
	token := strings.TrimSpace(string(b))
	switch {
	case len(token) < minTokenBytes:
		return "", errdefs.New(errdefs.ErrInvalid, "the token in %s has %d bytes, at least %d are needed", path, len(token), minTokenBytes)
	case strings.HasPrefix(token, "REPLACE_ME"), strings.HasPrefix(token, "CHANGE_ME"):
		return "", errdefs.New(errdefs.ErrInvalid, "the token in %s is a placeholder", path)
	}
	return token, nil
}

// raiseFileLimit makes room for three descriptors for each sandbox.
func raiseFileLimit() error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("read descriptor limit: %w", err)
	}
	l.Cur = l.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return fmt.Errorf("raise descriptor limit: %w", err)
	}
	return nil
}
