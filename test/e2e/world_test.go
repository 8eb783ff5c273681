package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	forkd "forkd.dev/forkd/sdk/go"
)

// Patience with things that end by themselves. None of them is a promise of speed.
const (
	startPatience   = 30 * time.Second
	preparePatience = 6 * time.Minute
	endPatience     = 30 * time.Second
)

// world is a daemon in a directory of its own.
type world struct {
	dir  string // removed at the end
	bin  string // the program under test
	data string
	tmp  string // TMPDIR of everything that is started
	addr string
	keep bool // data is the caller's
	// settings are FORKD_* variables of the daemon.
	settings []string
	// installation names the daemon's machines and control groups on the host.
	installation string

	client *forkd.Client
	// life orders starts and ends, which an interrupt brings from another goroutine.
	life   sync.Mutex
	daemon *exec.Cmd
	exited chan struct{} // closed when daemon has
	over   bool          // no daemon is started any more
}

// newWorld builds the program, starts the daemon and waits for py-base.
func newWorld() (_ *world, err error) {
	dir, err := os.MkdirTemp("/var/tmp", "forkd-e2e-")
	if err != nil {
		return nil, err
	}
	w := &world{dir: dir, bin: filepath.Join(dir, "forkd"), data: filepath.Join(dir, "data"), tmp: filepath.Join(dir, "tmp")}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if err := os.Mkdir(w.tmp, 0o700); err != nil {
		return nil, err
	}
	if *givenData != "" {
		w.data, w.keep = *givenData, true
	}
	if err := w.build(); err != nil {
		return nil, err
	}
	if w.addr, err = freeAddress(); err != nil {
		return nil, err
	}
	if w.client, err = forkd.New(forkd.Options{BaseURL: w.url()}); err != nil {
		return nil, err
	}
	if err := w.start(); err != nil {
		return nil, err
	}
	return w, w.await(preparePatience, func(ctx context.Context) error {
		sn, err := w.client.Snapshot(ctx, "py-base")
		switch {
		case err != nil:
			return err
		case !sn.Bootable:
			return fmt.Errorf("py-base is %s", sn.Status)
		}
		return w.learnInstallation()
	})
}

// build makes the program as `make build` does, but with the agent laid over the
// tree instead of in it: others may be building there.
func (w *world) build() error {
	if *givenProgram != "" {
		from, err := filepath.Abs(*givenProgram)
		if err != nil {
			return err
		}
		return os.Symlink(from, w.bin)
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		return err
	}
	agent := filepath.Join(w.dir, "forkd-agent")
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{
		filepath.Join(root, "internal/programs/embedded/forkd-agent"): agent,
	}})
	if err != nil {
		return err
	}
	overlayFile := filepath.Join(w.dir, "overlay.json")
	if err := os.WriteFile(overlayFile, overlay, 0o600); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"-buildvcs=false", "-ldflags", "-s -w", "-o", agent, "./cmd/forkd-agent"},
		{"-overlay", overlayFile, "-ldflags", "-s -w -X forkd.dev/forkd/internal/programs.stamp=e2e", "-o", w.bin, "./cmd/forkd"},
	} {
		cmd := exec.Command("go", append([]string{"build", "-trimpath"}, args...)...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", cmd, err, out)
		}
	}
	return nil
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

func (w *world) url() string     { return "http://" + w.addr }
func (w *world) logPath() string { return filepath.Join(w.dir, "daemon.log") }

func (w *world) logSize() int64 {
	info, err := os.Stat(w.logPath())
	if err != nil {
		return 0
	}
	return info.Size()
}

// logSince returns the end of what the daemon logged after an offset, without
// the requests that went well.
func (w *world) logSince(from int64) string {
	const most = 6000
	b, err := os.ReadFile(w.logPath())
	if err != nil {
		return err.Error()
	}
	var out strings.Builder
	for line := range strings.Lines(string(b[min(from, int64(len(b))):])) {
		if !strings.Contains(line, "msg=request") || !strings.Contains(line, "status=2") {
			out.WriteString(line)
		}
	}
	text := out.String()
	return text[max(0, len(text)-most):]
}

func (w *world) logTail() string { return w.logSince(0) }

// env is the environment of everything that is started, with more on top.
func (w *world) env(more ...string) []string {
	var env []string
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(name, "FORKD_") || name == "XDG_DATA_HOME" || name == "TMPDIR" {
			continue
		}
		env = append(env, kv)
	}
	env = append(env, "TMPDIR="+w.tmp, "FORKD_URL="+w.url(), "FORKD_DATA_DIR="+w.data)
	return append(env, more...)
}

// start starts the daemon and waits until it answers.
func (w *world) start() error {
	w.life.Lock()
	defer w.life.Unlock()
	if w.over {
		return errors.New("the tests are being ended")
	}
	log, err := os.OpenFile(w.logPath(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(w.bin, "serve", "--data-dir", w.data, "--bind", w.addr, "--prepare", "py-base")
	cmd.Env, cmd.Stdout, cmd.Stderr = w.env(w.settings...), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for us: we end it in order
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(exited)
	}()
	w.daemon, w.exited = cmd, exited
	return w.await(startPatience, w.client.Health)
}

// await repeats ask until it gives no error, the daemon ends or time is up.
func (w *world) await(within time.Duration, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("not after %v: %w\n%s", within, err, w.logTail())
		case <-w.exited:
			return fmt.Errorf("the daemon ended (%v): %w\n%s", w.daemon.ProcessState, err, w.logTail())
		}
	}
}

// up tells whether the daemon's process runs.
func (w *world) up() bool {
	if w.daemon == nil {
		return false
	}
	select {
	case <-w.exited:
		return false
	default:
		return true
	}
}

// end sends the daemon a signal and waits for its process to be gone.
func (w *world) end(sig syscall.Signal) error {
	w.life.Lock()
	defer w.life.Unlock()
	if !w.up() {
		return nil
	}
	if err := w.daemon.Process.Signal(sig); err != nil {
		return err
	}
	timer := time.NewTimer(endPatience)
	defer timer.Stop()
	select {
	case <-w.exited:
	case <-timer.C:
		return fmt.Errorf("the daemon still runs %v after %v\n%s", endPatience, sig, w.logTail())
	}
	w.client.Close()
	if code := w.daemon.ProcessState.ExitCode(); sig == syscall.SIGTERM && code != 0 {
		return fmt.Errorf("the daemon ended with %d after SIGTERM\n%s", code, w.logTail())
	}
	return nil
}

// stop ends the daemon as a service manager does; its sandboxes go on.
func (w *world) stop(t *testing.T) {
	t.Helper()
	if err := w.end(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

// crash kills the daemon.
func (w *world) crash(t *testing.T) {
	t.Helper()
	if err := w.end(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// restart starts the daemon unless it runs.
func (w *world) restart(t *testing.T) {
	t.Helper()
	if w.up() {
		return
	}
	if err := w.start(); err != nil {
		t.Fatal(err)
	}
}

// killAll ends every sandbox.
func (w *world) killAll(t testing.TB) {
	t.Helper()
	if err := w.endSandboxes(); err != nil {
		t.Error(err)
	}
}

func (w *world) endSandboxes() error {
	ctx, cancel := context.WithTimeout(context.Background(), endPatience)
	defer cancel()
	list, err := w.client.Sandboxes(ctx)
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	var errs []error
	for _, sb := range list {
		if sb.EndedAtUnix != nil {
			continue
		}
		err := w.client.Kill(ctx, sb.ID)
		if err != nil && !errors.Is(err, forkd.ErrNotFound) && !errors.Is(err, forkd.ErrConflict) { // a conflict: it is being ended
			errs = append(errs, fmt.Errorf("kill %s: %w", sb.ID, err))
		}
	}
	return errors.Join(errs...)
}

// close ends everything and reports what is left of it.
func (w *world) close() error {
	var err error
	if !w.up() && len(machines(w.data)) > 0 {
		err = w.start() // only a daemon ends what is left of a test that was cut short
	}
	w.life.Lock()
	w.over = true
	w.life.Unlock()
	if w.up() {
		err = errors.Join(err, w.endSandboxes(), w.end(syscall.SIGTERM))
	}
	if err == nil {
		err = waitUntil(endPatience, func() error { return w.leftovers(w.data) })
	}
	err = errors.Join(err, w.dropSmallDisk())
	if !w.keep {
		err = errors.Join(err, os.RemoveAll(w.data))
	}
	return errors.Join(err, os.RemoveAll(w.dir))
}
