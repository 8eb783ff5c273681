package linux

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// Unix socket addresses hold 107 bytes at most, data directories may be deeper.
// So sockets are bound and dialed as /proc/self/fd/N/NAME, N being a descriptor
// of their directory.

// ListenUnix creates a listening unix socket at path and returns its descriptor,
// for passing to another process. The socket file has mode 0600. The caller owns
// the file; closing it does not remove path.
func ListenUnix(path string) (*os.File, error) { return listen("unix", path) }

// ListenPackets is ListenUnix for a socket of packets (SOCK_SEQPACKET).
func ListenPackets(path string) (*os.File, error) { return listen("unixpacket", path) }

func listen(network, path string) (*os.File, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	defer dir.Close()
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: shortPath(dir, path), Net: network})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	defer l.Close() // the duplicate below keeps listening
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	f, err := l.File()
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return f, nil
}

// DialUnix connects to the unix socket at path.
func DialUnix(ctx context.Context, path string) (*net.UnixConn, error) {
	return dial(ctx, "unix", path)
}

// DialPackets is DialUnix for a socket of packets (SOCK_SEQPACKET).
func DialPackets(ctx context.Context, path string) (*net.UnixConn, error) {
	return dial(ctx, "unixpacket", path)
}

func dial(ctx context.Context, network, path string) (*net.UnixConn, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	defer dir.Close()
	var d net.Dialer
	c, err := d.DialContext(ctx, network, shortPath(dir, path))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return c.(*net.UnixConn), nil
}

func shortPath(dir *os.File, path string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
}
