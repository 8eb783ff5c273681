package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// maxQMPLine bounds one message of a QEMU process, which may be taken over by its
// guest. The longest honest one is a ringbuf-read of the whole console.
const maxQMPLine = 1 << 20

// qmpClient is one connection to the monitor of a QEMU process. Commands are
// serialised; events are handed to onEvent from the reading goroutine.
type qmpClient struct {
	conn    *net.UnixConn
	onEvent func(qmpEvent)
	done    chan struct{} // closed when reading ended

	cmd sync.Mutex // held during one command

	mu sync.Mutex
	// +checklocks:mu
	id int // of the command under way
	// +checklocks:mu
	reply chan qmpMessage // of the command under way
	// +checklocks:mu
	err error // why reading ended
}

type qmpEvent struct {
	Name string
	Data map[string]any
}

type qmpMessage struct {
	QMP    json.RawMessage `json:"QMP"`
	ID     int             `json:"id"`
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event string         `json:"event"`
	Data  map[string]any `json:"data"`
}

// dialQMP connects to the monitor socket at path and negotiates.
func dialQMP(ctx context.Context, path string, onEvent func(qmpEvent)) (*qmpClient, error) {
	conn, err := linux.DialUnix(ctx, path)
	if err != nil {
		return nil, err
	}
	c := &qmpClient{conn: conn, onEvent: onEvent, done: make(chan struct{}), reply: make(chan qmpMessage, 1)}
	greeting := make(chan struct{})
	go func() {
		defer close(c.done)
		defer conn.Close()
		c.read(greeting)
	}()
	select {
	case <-greeting:
	case <-c.done:
		return nil, c.closeWith(fmt.Errorf("monitor %s closed before its greeting: %w", path, errdefs.ErrUnavailable))
	case <-ctx.Done():
		return nil, c.closeWith(fmt.Errorf("wait for greeting of monitor %s: %w", path, ctx.Err()))
	}
	if err := c.run(ctx, "qmp_capabilities", nil, nil); err != nil {
		return nil, c.closeWith(err)
	}
	return c, nil
}

func (c *qmpClient) closeWith(err error) error {
	c.Close()
	return err
}

// Close ends the connection and waits for its goroutine.
func (c *qmpClient) Close() {
	_ = c.conn.Close()
	<-c.done
}

func (c *qmpClient) read(greeting chan struct{}) {
	sc := bufio.NewScanner(c.conn)
	sc.Buffer(make([]byte, 0, 4096), maxQMPLine)
	greeted := false
	for sc.Scan() {
		var m qmpMessage
		if err := json.Unmarshal(sc.Bytes(), &m); err != nil {
			c.fail(fmt.Errorf("monitor sent no JSON: %w", errdefs.ErrGuest))
			return
		}
		switch {
		case m.QMP != nil && !greeted:
			greeted = true
			close(greeting)
		case m.Event != "":
			c.onEvent(qmpEvent{Name: m.Event, Data: m.Data})
		default:
			c.deliver(m)
		}
	}
	err := sc.Err()
	if err == nil {
		err = errors.New("connection closed")
	}
	c.fail(fmt.Errorf("monitor: %w: %w", err, errdefs.ErrUnavailable))
}

// deliver hands a reply to the command under way. One of a command that was given
// up, or that nobody asked for, is dropped.
func (c *qmpClient) deliver(m qmpMessage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.ID != c.id {
		return
	}
	select {
	case c.reply <- m:
	default: // a second reply to the same command
	}
}

func (c *qmpClient) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

// run executes one command. files are passed along (for getfd and add-fd).
// result, if not nil, receives the decoded return value.
func (c *qmpClient) run(ctx context.Context, command string, args any, result any, files ...*os.File) error {
	c.cmd.Lock()
	defer c.cmd.Unlock()
	reply := make(chan qmpMessage, 1)
	c.mu.Lock()
	c.id++
	c.reply = reply
	id := c.id
	c.mu.Unlock()
	if err := c.send(ctx, map[string]any{"execute": command, "id": id}, args, files); err != nil {
		return fmt.Errorf("monitor command %s: %w", command, err)
	}
	select {
	case m := <-reply:
		if m.Error != nil {
			return fmt.Errorf("monitor command %s: %s: %s", command, m.Error.Class, m.Error.Desc)
		}
		if result != nil {
			if err := json.Unmarshal(m.Return, result); err != nil {
				return fmt.Errorf("monitor command %s: decode reply: %w", command, err)
			}
		}
		return nil
	case <-c.done:
		c.mu.Lock()
		defer c.mu.Unlock()
		return fmt.Errorf("monitor command %s: %w", command, c.err)
	case <-ctx.Done():
		return fmt.Errorf("monitor command %s: %w", command, ctx.Err())
	}
}

func (c *qmpClient) send(ctx context.Context, msg map[string]any, args any, files []*os.File) error {
	if args != nil {
		msg["arguments"] = args
	}
	b, err := json.Marshal(msg)
	if err != nil {
		return err
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	deadline := time.Time{}
	if d, ok := ctx.Deadline(); ok {
		deadline = d
	}
	_ = c.conn.SetWriteDeadline(deadline)
	_, _, err = c.conn.WriteMsgUnix(append(b, '\n'), oob, nil)
	return err
}
