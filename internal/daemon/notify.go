package daemon

import (
	"fmt"
	"net"
	"strings"
	"time"
)

// notifySocket is where a service manager (systemd with Type=notify) listens.
const notifySocket = "NOTIFY_SOCKET"

// notifier tells the service manager how far the daemon is, by sd_notify's
// datagrams. Without a manager it does nothing.
type notifier struct{ address string }

func newNotifier(getenv func(string) string) notifier { return notifier{address: getenv(notifySocket)} }

// notifyPatience bounds a manager that does not read.
const notifyPatience = 2 * time.Second

// send tells lines, each of the form NAME=VALUE.
func (n notifier) send(lines ...string) error {
	if n.address == "" {
		return nil
	}
	// Go writes "@" for the NUL that starts an abstract address, as systemd does.
	if !strings.HasPrefix(n.address, "/") && !strings.HasPrefix(n.address, "@") {
		return fmt.Errorf("notify service manager: $%s %.80q is no socket", notifySocket, n.address)
	}
	conn, err := net.DialTimeout("unixgram", n.address, notifyPatience)
	if err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(notifyPatience)); err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	if _, err := conn.Write([]byte(strings.Join(lines, "\n"))); err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	return nil
}

// ready says that requests are served, and stopping that no more are.
func (n notifier) ready(socket string) error {
	return n.send("READY=1", "STATUS=serving at "+socket)
}

func (n notifier) stopping() error { return n.send("STOPPING=1", "STATUS=stopping") }

// notify has the daemon tell n how far it is. That the manager cannot be told is no
// reason to end: it will find out by itself.
func (o *Options) notify(n notifier) {
	tell := func(err error) {
		if err != nil {
			_, _ = fmt.Fprintln(o.Log, err)
		}
	}
	o.Ready = func(socket string) { tell(n.ready(socket)) }
	o.Stopping = func() { tell(n.stopping()) }
}
