package forkd

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"

	"forkd.dev/forkd/internal/errdefs"
)

// deniedError names the group that may use a daemon's socket.
func deniedError(path string) error {
	err := errdefs.As(errdefs.ErrPermission, fmt.Errorf("%w for this user: permission denied on %s", ErrNoDaemon, path))
	group := "forkd"
	if info, statErr := os.Stat(path); statErr == nil {
		group = groupOf(info, group)
	}
	return errdefs.WithHint(err, "join the group %s (sudo usermod -aG %s $USER, then log in again), or use sudo", group, group)
}

// groupOf returns the name of the group that owns a file.
func groupOf(info os.FileInfo, fallback string) string {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fallback
	}
	g, err := user.LookupGroupId(strconv.FormatUint(uint64(st.Gid), 10))
	if err != nil {
		return fallback
	}
	return g.Name
}
