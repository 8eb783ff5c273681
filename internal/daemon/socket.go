package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"forkd.dev/forkd/internal/linux"
)

// socketGroup may use the system's daemon.
const socketGroup = "forkd"

// listenSocket listens at path with mode 0660; for root the group is forkd, if
// there is one. The data directory is locked, so an old socket is a dead one.
func listenSocket(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove old socket: %w", err)
	}
	f, err := linux.ListenUnix(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	gid := -1
	if g, err := user.LookupGroup(socketGroup); err == nil && os.Geteuid() == 0 {
		gid, _ = strconv.Atoi(g.Gid)
		// The group has to get through to the socket, and nowhere else.
		if err := os.Chmod(filepath.Dir(path), 0o711); err != nil {
			return nil, fmt.Errorf("open data directory to group %s: %w", socketGroup, err)
		}
	}
	if err := os.Chown(path, -1, gid); err != nil {
		return nil, fmt.Errorf("set group of %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o660); err != nil {
		return nil, fmt.Errorf("set mode of %s: %w", path, err)
	}
	return l, nil
}

// newServer bounds what a client can hold open. Bodies and replies have no
// deadline: builds take minutes and end with their connection.
func newServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}
