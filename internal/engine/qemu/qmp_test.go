package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

const greeting = `{"QMP": {"version": {}, "capabilities": []}}` + "\n"

// monitorPeer is the other side of a monitor, which a guest may have taken over.
type monitorPeer struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Scanner
}

// serveMonitor accepts one connection and plays with it; it returns the path.
func serveMonitor(t *testing.T, play func(p *monitorPeer)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qmp.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		play(&monitorPeer{t: t, conn: conn, in: bufio.NewScanner(conn)})
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-ended
	})
	return path
}

func (p *monitorPeer) say(text string) { _, _ = p.conn.Write([]byte(text)) }

// next returns the command that comes, or "" at the end.
func (p *monitorPeer) next() (name string, id int) {
	if !p.in.Scan() {
		return "", 0
	}
	var m struct {
		Execute string `json:"execute"`
		ID      int    `json:"id"`
	}
	if err := json.Unmarshal(p.in.Bytes(), &m); err != nil {
		p.t.Errorf("the client sent %q: %v", p.in.Text(), err)
	}
	return m.Execute, m.ID
}

// greet does what every monitor does first.
func (p *monitorPeer) greet() {
	p.say(greeting)
	name, id := p.next()
	if name != "qmp_capabilities" {
		p.t.Errorf("the first command is %q", name)
	}
	p.ok(id)
}

func (p *monitorPeer) ok(id int) { p.say(fmt.Sprintf(`{"return": {}, "id": %d}`+"\n", id)) }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func dialTest(t *testing.T, path string, onEvent func(qmpEvent)) *qmpClient {
	t.Helper()
	if onEvent == nil {
		onEvent = func(qmpEvent) {}
	}
	c, err := dialQMP(testContext(t), path, onEvent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestMonitorCommands(t *testing.T) {
	path := serveMonitor(t, func(p *monitorPeer) {
		p.greet()
		p.say(`{"event": "STOP", "data": {"why": "x"}}` + "\n")
		_, id := p.next()
		p.say(fmt.Sprintf(`{"return": {"status": "paused"}, "id": %d}`+"\n", id))
		_, id = p.next()
		p.say(fmt.Sprintf(`{"error": {"class": "GenericError", "desc": "no such thing"}, "id": %d}`+"\n", id))
		_, id = p.next()
		p.say(fmt.Sprintf(`{"return": [1], "id": %d}`+"\n", id))
		p.next()
	})
	events := make(chan qmpEvent, 1)
	c := dialTest(t, path, func(e qmpEvent) { events <- e })
	var status struct{ Status string }
	if err := c.run(testContext(t), "query-status", nil, &status); err != nil || status.Status != "paused" {
		t.Errorf("status is %+v, %v", status, err)
	}
	if e := <-events; e.Name != "STOP" || e.Data["why"] != "x" {
		t.Errorf("event is %+v", e)
	}
	if err := c.run(testContext(t), "wrong", nil, nil); err == nil || !strings.Contains(err.Error(), "no such thing") {
		t.Errorf("error is %v", err)
	}
	if err := c.run(testContext(t), "other-type", nil, &status); err == nil {
		t.Error("a result of the wrong type was decoded")
	}
}

// TestMonitorLateReply: the reply to a command that was given up is not taken for the
// reply to the next one.
func TestMonitorLateReply(t *testing.T) {
	first := make(chan struct{})
	path := serveMonitor(t, func(p *monitorPeer) {
		p.greet()
		_, late := p.next()
		close(first)
		_, id := p.next()
		p.say(fmt.Sprintf(`{"return": "late", "id": %d}`+"\n", late))
		p.say(`{"return": "unasked"}` + "\n")
		p.say(fmt.Sprintf(`{"return": "right", "id": %d}`+"\n", id))
		p.say(fmt.Sprintf(`{"return": "twice", "id": %d}`+"\n", id))
		_, id = p.next()
		p.say(fmt.Sprintf(`{"return": "last", "id": %d}`+"\n", id))
		p.next()
	})
	c := dialTest(t, path, nil)
	ctx, cancel := context.WithCancel(testContext(t))
	go func() { // ends with the test's first command
		<-first
		cancel()
	}()
	if err := c.run(ctx, "slow", nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a command that was given up: error is %v", err)
	}
	for _, want := range []string{"right", "last"} {
		var got string
		if err := c.run(testContext(t), "next", nil, &got); err != nil || got != want {
			t.Errorf("reply is %q, %v, want %q", got, err, want)
		}
	}
}

// TestHostileMonitor: whatever the other side does, a command ends with an error and
// the client can be closed.
func TestHostileMonitor(t *testing.T) {
	huge := strings.Repeat("x", 4*maxQMPLine)
	for name, c := range map[string]struct {
		play  func(p *monitorPeer)
		class error
	}{
		"garbage":         {func(p *monitorPeer) { p.greet(); p.next(); p.say("\x00\xff\n") }, errdefs.ErrGuest},
		"huge line":       {func(p *monitorPeer) { p.greet(); p.next(); p.say(huge) }, errdefs.ErrUnavailable},
		"huge string":     {func(p *monitorPeer) { p.greet(); p.next(); p.say(`{"return": "` + huge + `"}` + "\n") }, errdefs.ErrUnavailable},
		"no JSON object":  {func(p *monitorPeer) { p.greet(); p.next(); p.say("[1,2]\n") }, errdefs.ErrGuest},
		"deep nesting":    {func(p *monitorPeer) { p.greet(); p.next(); p.say(strings.Repeat("[", 100000) + "\n") }, errdefs.ErrGuest},
		"goes":            {func(p *monitorPeer) { p.greet(); p.next() }, errdefs.ErrUnavailable},
		"second greeting": {func(p *monitorPeer) { p.greet(); p.say(greeting + greeting); p.next() }, errdefs.ErrUnavailable},
		"event flood": {func(p *monitorPeer) {
			p.greet()
			p.next()
			p.say(strings.Repeat(`{"event": "STOP"}`+"\n", 10000))
		}, errdefs.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			client := dialTest(t, serveMonitor(t, c.play), nil)
			err := client.run(testContext(t), "query-status", nil, nil)
			if !errors.Is(err, c.class) {
				t.Errorf("error is %v, want class %v", err, c.class)
			}
			if err := client.run(testContext(t), "again", nil, nil); err == nil {
				t.Error("a command on a broken monitor has no error")
			}
		})
	}
}

func TestMonitorWithoutGreeting(t *testing.T) {
	for name, play := range map[string]func(p *monitorPeer){
		"silent":      func(p *monitorPeer) { p.next() },
		"goes":        func(*monitorPeer) {},
		"garbage":     func(p *monitorPeer) { p.say("hello\n") },
		"only events": func(p *monitorPeer) { p.say(`{"event": "STOP"}` + "\n"); p.next() },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			c, err := dialQMP(ctx, serveMonitor(t, play), func(qmpEvent) {})
			if err == nil {
				c.Close()
				t.Fatal("a monitor without greeting was accepted")
			}
		})
	}
	if _, err := dialQMP(testContext(t), filepath.Join(t.TempDir(), "nobody"), nil); err == nil {
		t.Error("a socket that does not exist was dialed")
	}
}
