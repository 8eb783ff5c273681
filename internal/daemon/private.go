package daemon

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// privateEnv marks a process as a private daemon. Its value is the data directory.
const privateEnv = "FORKD_PRIVATE_DAEMON"

// stopPatience is how long a private daemon may take to end its sandboxes.
const stopPatience = 60 * time.Second

// startPrivate starts this program as a private daemon and waits until it serves.
// It runs in a session of its own, so a Ctrl-C reaches only the command, which
// then stops it in order; and it reads the pipe that the command holds, so it
// ends even if the command is killed.
func startPrivate(ctx context.Context, dataDir, engine string) (socket string, stop func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", nil, fmt.Errorf("start private daemon: %w", err)
	}
	cmd := exec.Command(self, "serve")
	cmd.Env = append(os.Environ(), privateEnv+"="+dataDir)
	if engine != "" {
		cmd.Args = append(cmd.Args, "--engine", engine)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var log tailBuffer
	cmd.Stderr = &log
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		return "", nil, fmt.Errorf("start private daemon: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", nil, fmt.Errorf("start private daemon: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return "", nil, fmt.Errorf("start private daemon: %w", err)
	}
	stop = func() error {
		_ = lifeline.Close()
		timer := time.AfterFunc(stopPatience, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("stop private daemon: %w: %s", err, log.last())
		}
		return nil
	}
	ready := make(chan string, 1)
	go func() { // ends with the pipe, at the latest in stop
		line, _ := bufio.NewReader(out).ReadString('\n')
		ready <- strings.TrimSpace(line)
	}()
	select {
	case socket = <-ready:
	case <-ctx.Done():
		_ = stop()
		return "", nil, fmt.Errorf("start private daemon: %w", ctx.Err())
	}
	if socket == "" {
		_ = stop()
		return "", nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "start private daemon: %s", log.last()), "see what is missing with: forkd doctor")
	}
	return socket, stop, nil
}

// tailBuffer keeps the end of what is written to it.
type tailBuffer struct{ b []byte }

const tailBytes = 4096

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > tailBytes {
		t.b = t.b[len(t.b)-tailBytes:]
	}
	return len(p), nil
}

// last returns the last line. It is called after the process has ended.
func (t *tailBuffer) last() string {
	lines := bytes.Split(bytes.TrimSpace(t.b), []byte("\n"))
	return string(lines[len(lines)-1])
}
