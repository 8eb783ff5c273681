package agent

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/agentwire/link"
	"forkd.dev/forkd/internal/errdefs"
)

// buildStream returns what serves the streams of snapshot builds and of looks from
// outside, or nil.
func (a *Agent) buildStream(kind string) func(*link.Stream) {
	switch kind {
	case agentwire.StreamBuild:
		return a.serveBuild
	case agentwire.StreamBuildConn:
		return a.serveBuildConn
	case agentwire.StreamFiles:
		return a.serveFiles
	case agentwire.StreamInspect:
		return a.serveInspect
	case agentwire.StreamStart:
		return a.serveStart
	}
	if text, ok := strings.CutPrefix(kind, agentwire.StreamStartLog); ok {
		if offset, err := strconv.ParseUint(text, 10, 62); err == nil {
			return func(st *link.Stream) { a.serveStartLog(st, int64(offset)) }
		}
	}
	return nil
}

// buildProxyAddress is where programs of a build find the proxy.
const buildProxyAddress = "127.0.0.1:3128"

// maxBuildSettings bounds the settings of a build, unpacked in memory.
const maxBuildSettings = 16 << 20

// buildNet is the network of a build, of which there is at most one. The agent
// knows nothing of HTTP: it hands connections to the host as they are.
type buildNet struct {
	mu sync.Mutex
	// +checklocks:mu
	busy bool // one is open, opens or closes
	// +checklocks:mu
	open *proxyEnd
}

// proxyEnd is the guest's end of the proxy.
type proxyEnd struct {
	listener net.Listener
	conns    chan net.Conn // from the listener to the stream that waits for one
	ctx      context.Context
	cancel   context.CancelFunc
	users    sync.WaitGroup // the listener's goroutine and the joined connections
}

// take claims the network, which give returns.
func (b *buildNet) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	free := !b.busy
	b.busy = true
	return free
}

func (b *buildNet) give() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.busy = false
}

func (b *buildNet) set(e *proxyEnd) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open = e
}

// use returns the open proxy, if there is one, with the caller among its users.
func (b *buildNet) use() *proxyEnd {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open != nil {
		b.open.users.Add(1)
	}
	return b.open
}

// serveBuild keeps the network of a build up until the host ends the stream, or
// is gone, and then removes every trace of it.
func (a *Agent) serveBuild(st *link.Stream) {
	st.Accept()
	defer st.Close()
	end, err := a.openBuild(st)
	if err != nil {
		agentwire.WriteAnswer(st, "", err)
		st.CloseWrite()
		drain(st)
		return
	}
	agentwire.WriteAnswer(st, end.listener.Addr().String(), nil)
	stop := context.AfterFunc(a.ctx, func() { st.Close() })
	drain(st)
	stop()
	err = a.closeBuild(end)
	agentwire.WriteAnswer(st, "", err)
	st.CloseWrite()
}

// drain reads to the end of what the peer sends.
func drain(st *link.Stream) { io.Copy(io.Discard, st) }

// openBuild unpacks the settings and opens the proxy.
func (a *Agent) openBuild(st *link.Stream) (*proxyEnd, error) {
	if !a.build.take() {
		return nil, errdefs.New(errdefs.ErrConflict, "a build has the network already")
	}
	end, err := a.prepareBuild(st)
	if err != nil {
		err = errors.Join(err, a.removeBuildFiles())
		a.build.give()
		return nil, err
	}
	end.users.Go(end.accept)
	a.build.set(end)
	return end, nil
}

func (a *Agent) prepareBuild(st *link.Stream) (*proxyEnd, error) {
	if err := a.removeBuildFiles(); err != nil {
		return nil, err
	}
	for _, dir := range buildDirs() {
		if err := os.MkdirAll(a.path(dir), 0o755); err != nil {
			return nil, err
		}
	}
	u := unpacker{dir: a.path("/"), only: buildDirs(), limit: maxBuildSettings}
	if err := u.unpack(st); err != nil {
		return nil, err
	}
	address := buildProxyAddress
	if !a.cfg.System {
		address = "127.0.0.1:0" // the loopback is that of others too
	}
	l, err := new(net.ListenConfig).Listen(a.ctx, "tcp", address)
	if err != nil { // some program of the guest has that port
		l, err = new(net.ListenConfig).Listen(a.ctx, "tcp", "127.0.0.1:0")
	}
	if err != nil {
		return nil, errdefs.New(errdefs.ErrConflict, "open proxy of the build: %w", err)
	}
	end := &proxyEnd{listener: l, conns: make(chan net.Conn)}
	end.ctx, end.cancel = context.WithCancel(a.ctx)
	return end, nil
}

// accept hands connections over one by one; more wait in the listener's backlog.
func (e *proxyEnd) accept() {
	for {
		conn, err := e.listener.Accept()
		if err != nil {
			return
		}
		select {
		case e.conns <- conn:
		case <-e.ctx.Done():
			conn.Close()
			return
		}
	}
}

// closeBuild ends the proxy and its connections and removes the files.
func (a *Agent) closeBuild(e *proxyEnd) error {
	defer a.build.give()
	a.build.set(nil)
	e.cancel()
	e.listener.Close()
	e.users.Wait()
	err := a.removeBuildFiles()
	if a.identity.ownKernel() { // a user-space kernel has no free pages: it gives them back
		scrubFreeMemory()
	}
	return err
}

func buildDirs() []string { return []string{agentwire.BuildDir, agentwire.BuildCacheDir} }

func (a *Agent) removeBuildFiles() error {
	var errs []error
	for _, dir := range buildDirs() {
		if err := os.RemoveAll(a.path(dir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, errdefs.New(errdefs.ErrInternal, "remove settings of the build: %w", err))
		}
	}
	return errors.Join(errs...)
}

// serveBuildConn waits for a connection to the proxy and carries it.
func (a *Agent) serveBuildConn(st *link.Stream) {
	e := a.build.use()
	if e == nil {
		st.Refuse("no build has the network")
		return
	}
	defer e.users.Done()
	select {
	case conn := <-e.conns:
		st.Accept()
		join(e.ctx, st, conn)
	case <-st.Done():
	case <-e.ctx.Done():
		st.Refuse("the build has ended")
	}
}
