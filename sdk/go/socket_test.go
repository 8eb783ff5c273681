package forkd

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDeniedSocketNamesItsGroup: root may open any socket, so the refusal of the
// kernel is handed in.
func TestDeniedSocketNamesItsGroup(t *testing.T) {
	path := filepath.Join(t.TempDir(), "forkd.sock")
	if err := os.WriteFile(path, nil, 0o660); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	group := groupOf(info, "forkd")
	refused := &net.OpError{Op: "dial", Net: "unix", Err: &fs.PathError{Op: "connect", Path: path, Err: fs.ErrPermission}}
	byPath := &Client{target: "unix://" + path}
	byLooking := &Client{target: DefaultURL, denied: path}
	for _, err := range []error{
		byPath.connectError(context.Background(), refused),
		byLooking.connectError(context.Background(), &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}),
	} {
		if !errors.Is(err, ErrPermission) || !errors.Is(err, ErrNoDaemon) || !strings.Contains(err.Error(), path) || !strings.Contains(Hint(err), "group "+group) {
			t.Errorf("%v (hint %q)", err, Hint(err))
		}
	}
}
