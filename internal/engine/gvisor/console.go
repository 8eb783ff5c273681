package gvisor

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// keptConsole is how much of the end of a console is kept. Nobody keeps more: what a
// sandbox prints must not fill a disk of the host. While no daemon runs, init finds
// the pipe full and drops its lines.
const keptConsole = 64 << 10

// console collects what a sandbox's init and runsc print.
type console struct {
	dir string

	mu sync.Mutex
	// +checklocks:mu
	pipe *os.File // nil until the first look
	// +checklocks:mu
	kept []byte
}

// open opens the pipe. We hold its writing end, too: it has no end before we close it.
func (c *console) open() (*os.File, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pipe == nil {
		f, err := openPipe(filepath.Join(c.dir, consolePipe), unix.O_RDWR)
		if err != nil {
			return nil, err
		}
		c.pipe = f
	}
	return c.pipe, nil
}

// fill reads until ctx ends or close is called.
func (c *console) fill(ctx context.Context) {
	pipe, err := c.open()
	if err != nil {
		return
	}
	stop := context.AfterFunc(ctx, c.close)
	defer stop()
	var buf [4 << 10]byte
	for {
		n, err := pipe.Read(buf[:])
		if err != nil {
			return
		}
		c.keep(buf[:n])
	}
}

func (c *console) keep(p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.kept = append(c.kept, p...)
	if over := len(c.kept) - keptConsole; over > 0 {
		c.kept = append(c.kept[:0], c.kept[over:]...)
	}
}

func (c *console) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pipe != nil {
		_ = c.pipe.Close()
	}
}

func (c *console) text() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Clone(c.kept)
}

// drain returns what is in a pipe.
func drain(pipe *os.File) string {
	_ = pipe.SetReadDeadline(time.Now().Add(drainTime))
	var out []byte
	var buf [4 << 10]byte
	for len(out) < keptConsole {
		n, err := pipe.Read(buf[:])
		out = append(out, buf[:n]...)
		if err != nil {
			break
		}
	}
	return string(out)
}

// drainTime is enough to read what is in a pipe already.
const drainTime = 5 * time.Millisecond

// reader returns what was printed so far.
func (c *console) reader() io.ReadCloser { return io.NopCloser(bytes.NewReader(c.text())) }
