package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
	forkd "forkd.dev/forkd/sdk/go"
)

// counterProgram counts in a page of the guest's memory, without ever sleeping, and
// prints the random marker that the page starts with. In a fork, which it knows by
// the generation file, it ends: children are not to compete for the processor.
const counterProgram = `
import ctypes, mmap, os, struct
m = mmap.mmap(-1, 4096)
try:
    ctypes.CDLL(None).mlockall(3)
except Exception:
    pass
def generation():
    try:
        s = os.stat("/run/forkd/generation")
        return s.st_mtime_ns, s.st_ino, s.st_size
    except OSError:
        return None
was, n, pack = generation(), 0, struct.Struct("<Q").pack_into
k = os.urandom(32)
m[0:32] = k
print(k.hex(), flush=True)
while n % 256 or generation() == was:
    n += 1
    pack(m, 64, n)
`

// Where things stand in the counter's page.
const (
	markerBytes   = 32
	counterOffset = 64
)

// startCounter runs the program in a sandbox and returns its marker.
func startCounter(ctx context.Context, c *forkd.Client, id string) ([]byte, error) {
	const script = `rm -f /tmp/forkd-bench.out; setsid python3 -c "$FORKD_BENCH" >/tmp/forkd-bench.out 2>&1 </dev/null &
n=0; while [ $n -lt 300 ] && ! grep -q . /tmp/forkd-bench.out; do n=$((n+1)); sleep 0.05; done; cat /tmp/forkd-bench.out`
	res, err := c.Exec(ctx, id, forkd.ExecRequest{Args: []string{"/bin/sh", "-c", script}, Env: map[string]string{"FORKD_BENCH": counterProgram}})
	if err != nil {
		return nil, fmt.Errorf("start the counter in %s: %w", id, err)
	}
	marker, err := hex.DecodeString(strings.TrimSpace(res.Stdout))
	if err != nil || len(marker) != markerBytes {
		return nil, errdefs.New(errdefs.ErrGuest, "the counter in %s did not start: exit %d, %.200q", id, res.ExitCode, res.Stdout+res.Stderr)
	}
	return marker, nil
}

// guestMemory is how QEMU's mappings of a guest's memory are named.
func guestMemory(m linux.Mapping) bool {
	return strings.HasPrefix(m.Path, "/memfd:forkd-memory") && strings.HasPrefix(m.Perms, "rw")
}

// findCounter looks for the counter with that marker in the memory of process pid:
// a written page that starts with it and whose counter moves. It returns what reads
// the counter.
func findCounter(pid int, marker []byte, pick func(linux.Mapping) bool) (func() (uint64, error), error) {
	maps, err := linux.Mappings(pid)
	if err != nil {
		return nil, errdefs.As(errdefs.ErrUnavailable, err)
	}
	for _, m := range maps {
		if !pick(m) {
			continue
		}
		runs, err := linux.PrivatePages(pid, m)
		if err != nil {
			return nil, errdefs.As(errdefs.ErrUnavailable, err)
		}
		for _, r := range runs {
			found, err := searchPages(pid, m.Start+r.Start*linux.PageSize, int(r.Count), marker)
			if err != nil {
				return nil, errdefs.As(errdefs.ErrUnavailable, err)
			}
			for _, addr := range found {
				read := counterAt(pid, addr)
				if moves(read) {
					return read, nil
				}
			}
		}
	}
	return nil, errdefs.New(errdefs.ErrUnavailable, "no counter with its marker moves in the memory of process %d", pid)
}

// searchPages returns the addresses of those of n pages that start with marker.
func searchPages(pid int, start uint64, n int, marker []byte) ([]uint64, error) {
	const chunk = 1024
	var found []uint64
	buf := make([]byte, min(n, chunk)*linux.PageSize)
	for done := 0; done < n; done += chunk {
		part := buf[:min(n-done, chunk)*linux.PageSize]
		base := start + uint64(done)*linux.PageSize
		if err := linux.ReadProcess(pid, base, part); err != nil {
			return nil, err
		}
		for at := 0; at < len(part); at += linux.PageSize {
			if bytes.HasPrefix(part[at:], marker) {
				found = append(found, base+uint64(at)+counterOffset)
			}
		}
	}
	return found, nil
}

func counterAt(pid int, addr uint64) func() (uint64, error) {
	buf := make([]byte, 8)
	return func() (uint64, error) {
		err := linux.ReadProcess(pid, addr, buf)
		return binary.LittleEndian.Uint64(buf), err
	}
}

// moves tells whether a counter changes soon.
func moves(read func() (uint64, error)) bool {
	first, err := read()
	for range 1000 {
		if err != nil {
			return false
		}
		nap()
		var now uint64
		if now, err = read(); err == nil && now != first {
			return true
		}
	}
	return false
}

// watchStep is how often the counter is looked at.
const watchStep = 500 * time.Microsecond

// nap waits for watchStep. The timers of Go's runtime are too coarse for that.
func nap() {
	d := syscall.NsecToTimespec(int64(watchStep))
	_ = syscall.Nanosleep(&d, nil) // a shorter nap does no harm
}

// gap is a time in which the counter was not seen to change.
type gap struct{ from, to time.Time }

// keptGap is the shortest gap worth keeping.
const keptGap = time.Millisecond

// watch looks at a counter until it is stopped.
type watch struct {
	stop chan struct{}
	done sync.WaitGroup

	mu sync.Mutex
	// +checklocks:mu
	gaps []gap
	// +checklocks:mu
	last time.Time // the counter was seen to have changed
	// +checklocks:mu
	err error
}

// startWatch watches what read gives until close.
func startWatch(read func() (uint64, error)) *watch {
	w := &watch{stop: make(chan struct{}), last: time.Now()}
	w.done.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		w.run(read)
	})
	return w
}

func (w *watch) run(read func() (uint64, error)) {
	var before uint64
	for {
		select {
		case <-w.stop:
			return
		default:
		}
		nap()
		n, err := read()
		now := time.Now()
		if err != nil {
			w.mu.Lock()
			w.err = err
			w.mu.Unlock()
			return
		}
		if n == before {
			continue
		}
		before = n
		w.mu.Lock()
		if now.Sub(w.last) >= keptGap {
			w.gaps = append(w.gaps, gap{w.last, now})
		}
		w.last = now
		w.mu.Unlock()
	}
}

func (w *watch) close() {
	close(w.stop)
	w.done.Wait()
}

// longest returns the longest gap that touches the time between from and to, after
// it has ended.
func (w *watch) longest(ctx context.Context, from, to time.Time) (time.Duration, error) {
	const patience = 10 * time.Second
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		longest, ended, err := w.look(from, to)
		switch {
		case err != nil:
			return 0, fmt.Errorf("watch the guest's counter: %w", err)
		case ended:
			return longest, nil
		case time.Since(to) > patience:
			return 0, errdefs.New(errdefs.ErrGuest, "the guest's counter stands still for %s", patience)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (w *watch) look(from, to time.Time) (longest time.Duration, ended bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.gaps {
		if g.to.After(from) && g.from.Before(to) {
			longest = max(longest, g.to.Sub(g.from))
		}
	}
	return longest, w.last.After(to), w.err
}
