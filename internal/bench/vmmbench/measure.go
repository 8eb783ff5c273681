package vmmbench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/bench/floor"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmmwire"
)

// workers is how many forks are made at a time, by us and by the floor.
const workers = 2

// together does n things, workers at a time, and returns the first error.
func together(n int, do func(i int) error) error {
	var wg sync.WaitGroup
	errs := make([]error, workers)
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	for w := range workers {
		wg.Go(func() {
			for i := range next {
				if errs[w] = do(i); errs[w] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[len(s)/2]
}

// forked is what n forks took.
type forked struct{ totalMS, p50MS, destroyMS, pssKiB, dirtyKiB float64 }

// fork makes n forks. pooled ones have their processes before the clock starts.
func (h *host) fork(ctx context.Context, s *snapshot, n int, pooled bool) (r forked, err error) {
	list := make([]*vmm, n)
	defer func() {
		for _, v := range list {
			if v != nil {
				v.kill()
			}
		}
		for _, v := range list {
			if v != nil {
				v.reap()
			}
		}
	}()
	begin := func(i int) error {
		v, err := h.start(ctx, i+1)
		list[i] = v
		return err
	}
	if pooled {
		if err := together(n, begin); err != nil {
			return r, err
		}
	}
	took := make([]float64, n)
	start := time.Now()
	err = together(n, func(i int) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		from := time.Now()
		if !pooled {
			if err := begin(i); err != nil {
				return err
			}
		}
		err := list[i].restore(ctx, s, i+1)
		took[i] = millis(time.Since(from))
		return err
	})
	if err != nil {
		return r, h.said(err)
	}
	r.totalMS, r.p50MS = millis(time.Since(start)), median(took)
	if r.pssKiB, r.dirtyKiB, err = memoryOf(list); err != nil {
		return r, err
	}
	start = time.Now()
	for _, v := range list {
		v.kill()
	}
	for i, v := range list {
		v.reap()
		list[i] = nil
	}
	r.destroyMS = millis(time.Since(start))
	return r, nil
}

// memoryOf returns the mean of what the processes have in memory.
func memoryOf(list []*vmm) (pss, dirty float64, err error) {
	for _, v := range list {
		b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(v.cmd.Process.Pid), "smaps_rollup"))
		if err != nil {
			return 0, 0, err
		}
		for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
			f := strings.Fields(sc.Text())
			if len(f) != 3 {
				continue
			}
			kib, _ := strconv.ParseFloat(f[1], 64)
			switch f[0] {
			case "Pss:":
				pss += kib
			case "Private_Dirty:":
				dirty += kib
			}
		}
	}
	n := float64(len(list))
	return pss / n, dirty / n, nil
}

// buildFloor compiles the C program.
func (h *host) buildFloor(ctx context.Context) (string, error) {
	source, program := filepath.Join(h.dir, "floor.c"), filepath.Join(h.dir, "floor")
	if err := os.WriteFile(source, floor.Source, 0o600); err != nil {
		return "", err
	}
	out, err := exec.CommandContext(ctx, "cc", "-O2", "-o", program, source, "-lpthread").CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return "", errdefs.WithHint(errdefs.As(errdefs.ErrUnsupported, err), "install gcc")
	}
	if err != nil {
		return "", fmt.Errorf("compile the floor: %w: %s", err, out)
	}
	return program, nil
}

// runFloor runs the C program on s.
func (h *host) runFloor(ctx context.Context, program string, s *snapshot, n int) (r forked, err error) {
	cmd := exec.CommandContext(ctx, program, "/proc/self/fd/3", strconv.Itoa(memoryMiB), "/proc/self/fd/4", strconv.Itoa(n), strconv.Itoa(workers))
	cmd.ExtraFiles = []*os.File{s.memory, s.state}
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		return r, fmt.Errorf("run the floor: %w: %s", err, errOut.String())
	}
	var v struct {
		Total   float64 `json:"total_ms"`
		P50     float64 `json:"p50_ms"`
		Destroy float64 `json:"destroy_ms"`
	}
	if err := json.Unmarshal(out, &v); err != nil {
		return r, fmt.Errorf("read the floor's result: %w", err)
	}
	return forked{totalMS: v.Total, p50MS: v.P50, destroyMS: v.Destroy}, nil
}

// withFork makes one fork of a guest with that command line and hands it out.
func (h *host) withFork(ctx context.Context, cmdline string, use func(v *vmm, s *snapshot) error) error {
	s, err := h.makeSnapshot(ctx, cmdline)
	if err != nil {
		return err
	}
	defer s.close()
	v, err := h.start(ctx, 1)
	if err != nil {
		return err
	}
	defer v.end()
	if err := v.restore(ctx, s, 1); err != nil {
		return h.said(err)
	}
	if err := use(v, s); err != nil {
		return h.said(err)
	}
	return nil
}

// rollback measures rollbacks of n written pages.
func (h *host) rollback(ctx context.Context, n, runs int) (ms []float64, err error) {
	cmdline := fmt.Sprintf("base=%d touch=%d wait=1 cow=%d", baseMiB, 256, n)
	err = h.withFork(ctx, cmdline, func(v *vmm, s *snapshot) error {
		for i := range runs {
			m := &vmmwire.Rollback{Memory: vmmwire.Memory{Ranges: s.ranges}, State: 1, ToLast: true}
			start := time.Now()
			if err := v.Do(ctx, m, s.memory, s.state); err != nil {
				return err
			}
			ms = append(ms, millis(time.Since(start)))
			// The same pages again: the guest waits for another generation.
			m.Run, m.Generation = true, [16]byte{2, byte(i)}
			if err := v.Do(ctx, m, s.memory, s.state); err != nil {
				return err
			}
			if err := v.expect(ctx, '@'); err != nil {
				return err
			}
		}
		return nil
	})
	return ms, err
}

// branch measures captures of a guest that has n pages of its own and rewrites hot of them
// all the time.
func (h *host) branch(ctx context.Context, n, hot, runs int) (pause, total []float64, err error) {
	cmdline := fmt.Sprintf("base=%d touch=%d wait=1 cow=%d hot=%d mode=work", baseMiB, 256, n, hot)
	err = h.withFork(ctx, cmdline, func(v *vmm, _ *snapshot) error {
		c, err := newCapture()
		if err != nil {
			return err
		}
		defer c.close()
		for i := range runs + 1 {
			took, err := c.take(ctx, v, true)
			if err != nil {
				return err
			}
			if i > 0 { // the first fills the arena, as a daemon has done before
				pause, total = append(pause, millis(c.done.Pause)), append(total, millis(took))
			}
		}
		return nil
	})
	return pause, total, err
}
