package linux

import (
	"fmt"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// TSCkHz returns the rate of the host's time stamp counter in kHz: as KVM knows
// it, or else measured against CLOCK_MONOTONIC_RAW in about 50 ms. The two agree
// within a few ten ppm; from boot to boot the kernel's own value moves as much.
// Compare with a tolerance (500 ppm).
func TSCkHz() (uint64, error) {
	if khz, err := kvmTSCkHz(); err == nil {
		return khz, nil
	}
	return measureTSCkHz()
}

func kvmTSCkHz() (uint64, error) {
	vm, err := openThrowawayVM()
	if err != nil {
		return 0, fmt.Errorf("ask KVM for the TSC rate: %w", err)
	}
	defer vm.close()
	khz, err := vm.tscKHz()
	if err != nil {
		return 0, fmt.Errorf("ask KVM for the TSC rate: %w", err)
	}
	return khz, nil
}

// measureTSCkHz takes the median of several short windows, so that one spoiled
// by a preemption does not count.
func measureTSCkHz() (uint64, error) {
	const (
		windows = 5
		window  = 10 * time.Millisecond
	)
	var rates []float64
	for range windows {
		tsc0, at0, err := sampleTSC()
		if err != nil {
			return 0, err
		}
		<-time.After(window)
		tsc1, at1, err := sampleTSC()
		if err != nil {
			return 0, err
		}
		if tsc1 <= tsc0 || at1 <= at0 {
			return 0, errdefs.New(errdefs.ErrUnsupported, "measure the TSC rate: the counter does not advance with the clock")
		}
		rates = append(rates, float64(tsc1-tsc0)*1e6/float64(at1-at0))
	}
	slices.Sort(rates)
	return uint64(math.Round(rates[len(rates)/2])), nil
}

// sampleTSC pairs the counter with the raw monotonic clock in ns. Of several tries
// it keeps the one with the shortest time between the two looks at the counter.
func sampleTSC() (tsc uint64, at int64, err error) {
	const tries = 16
	best := uint64(math.MaxUint64)
	for range tries {
		var ts unix.Timespec
		before := readTSC()
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_RAW, &ts); err != nil {
			return 0, 0, fmt.Errorf("measure the TSC rate: read the clock: %w", classify(err))
		}
		if width := readTSC() - before; width < best {
			best, tsc, at = width, before+width/2, ts.Nano()
		}
	}
	return tsc, at, nil
}
