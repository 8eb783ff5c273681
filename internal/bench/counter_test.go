package bench

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// counterEnv makes the test program count, as the guest's program does.
const counterEnv = "FORKD_BENCH_COUNT"

// TestMain runs the program that is watched, if this is its process.
func TestMain(m *testing.M) {
	if raw := os.Getenv(counterEnv); raw != "" {
		if err := countForever(raw); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if parent := os.Getenv(tempHolder); parent != "" {
		if err := holdTempDir(parent); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// countForever writes the marker and then counts beside it, until its input ends.
func countForever(raw string) error {
	marker, err := hex.DecodeString(raw)
	if err != nil {
		return err
	}
	page, err := syscall.Mmap(-1, 0, linux.PageSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return err
	}
	copy(page, marker)
	fmt.Fprintln(os.Stdout, "counting")
	go func() { // ends with the other test, whatever happens there
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	for n := uint64(1); ; n++ {
		binary.LittleEndian.PutUint64(page[counterOffset:], n)
	}
}

// TestStallIsSeenFromOutside: the counter of another process is found by its marker,
// and a stop of that process is seen as long as it was.
func TestStallIsSeenFromOutside(t *testing.T) {
	marker := bytes.Repeat([]byte{0xa5, 0x17, 0x3c, byte(os.Getpid())}, markerBytes/4)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), counterEnv+"="+hex.EncodeToString(marker))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	var told strings.Builder
	buf := make([]byte, 256)
	for !strings.Contains(told.String(), "counting") {
		n, err := out.Read(buf)
		if err != nil {
			t.Fatalf("%v after %q", err, told.String())
		}
		told.Write(buf[:n])
	}
	anonymous := func(m linux.Mapping) bool { return m.Path == "" && strings.HasPrefix(m.Perms, "rw") }
	if _, err := findCounter(cmd.Process.Pid, bytes.Repeat([]byte{1}, markerBytes), anonymous); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("another marker: %v", err)
	}
	read, err := findCounter(cmd.Process.Pid, marker, anonymous)
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		t.Skip("the memory of other processes is not to be seen here")
	}
	if err != nil {
		t.Fatal(err)
	}
	w := startWatch(read)
	defer w.close()
	const stopped = 150 * time.Millisecond
	from := time.Now()
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := pass(t.Context(), stopped); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	longest, err := w.longest(t.Context(), from, time.Now())
	// A busy host may add to it, and let go of nothing.
	if err != nil || longest < stopped-2*time.Millisecond || longest > stopped+2*time.Second {
		t.Errorf("seen as %s, %v", longest, err)
	}
}

func TestWatch(t *testing.T) {
	var n atomic.Uint64
	var still, gone atomic.Bool
	lost := errdefs.New(errdefs.ErrNotFound, "no process")
	w := startWatch(func() (uint64, error) {
		if gone.Load() {
			return 0, lost
		}
		if still.Load() {
			return n.Load(), nil
		}
		return n.Add(1), nil
	})
	defer w.close()
	from := time.Now()
	still.Store(true)
	if err := pass(t.Context(), 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	to := time.Now()
	still.Store(false) // the gap ends after the window, and counts whole
	if longest, err := w.longest(t.Context(), from, to); err != nil || longest < 45*time.Millisecond {
		t.Errorf("%s, %v", longest, err)
	}
	if longest, _, _ := w.look(from.Add(-time.Hour), from.Add(-time.Minute)); longest != 0 {
		t.Errorf("%s before there was anything", longest)
	}
	gone.Store(true)
	if _, err := w.longest(t.Context(), to, time.Now()); !errors.Is(err, lost) {
		t.Errorf("a lost machine: %v", err)
	}
}

func TestGuestMemory(t *testing.T) {
	for _, c := range []struct {
		m    linux.Mapping
		want bool
	}{
		{linux.Mapping{Path: "/memfd:forkd-memory (deleted)", Perms: "rw-p"}, true},
		{linux.Mapping{Path: "/memfd:forkd-memory (deleted)", Perms: "r--p"}, false},
		{linux.Mapping{Path: "/memfd:other (deleted)", Perms: "rw-p"}, false},
		{linux.Mapping{Perms: "rw-p"}, false},
	} {
		if guestMemory(c.m) != c.want {
			t.Errorf("%+v", c.m)
		}
	}
}
