package daemon

import (
	"net"
	"path/filepath"
	"testing"
	"time"
)

func listenNotify(t *testing.T, address string) *net.UnixConn {
	t.Helper()
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: address, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	if err := l.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return l
}

func receive(t *testing.T, l *net.UnixConn) string {
	t.Helper()
	buf := make([]byte, 4096)
	n, err := l.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return string(buf[:n])
}

func TestNotify(t *testing.T) {
	for name, address := range map[string]string{
		"path":     filepath.Join(t.TempDir(), "notify"),
		"abstract": "@forkd-notify-test-" + filepath.Base(t.TempDir()),
	} {
		t.Run(name, func(t *testing.T) {
			l := listenNotify(t, address)
			n := newNotifier(func(key string) string {
				return map[string]string{"NOTIFY_SOCKET": address}[key]
			})
			if err := n.ready("/data/forkd.sock"); err != nil {
				t.Fatal(err)
			}
			if got := receive(t, l); got != "READY=1\nSTATUS=serving at /data/forkd.sock" {
				t.Errorf("ready: %q", got)
			}
			if err := n.stopping(); err != nil {
				t.Fatal(err)
			}
			if got := receive(t, l); got != "STOPPING=1\nSTATUS=stopping" {
				t.Errorf("stopping: %q", got)
			}
		})
	}
}

func TestNotifyNobody(t *testing.T) {
	if err := newNotifier(func(string) string { return "" }).ready("x"); err != nil {
		t.Errorf("without a manager: %v", err)
	}
	for _, bad := range []string{"relative", filepath.Join(t.TempDir(), "absent")} {
		if err := newNotifier(func(string) string { return bad }).ready("x"); err == nil {
			t.Errorf("%q is told without an error", bad)
		}
	}
}
