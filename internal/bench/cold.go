package bench

import (
	"context"
	"strings"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// coldHow says what a cold boot contains.
const coldHow = "one machine of the same size from the image: start, kernel, agent, Python and the first answer of its runner to the same code; taken from the progress of a snapshot build, without the capture"

// boot builds a snapshot of the subject's image under a throw-away tag. How long it
// took to the end of the warm-up is the cold boot: the warm code is FirstCall, so
// then the runner has given its first answer.
func (s *subject) boot(ctx context.Context, memoryMiB int) (ColdBoot, string, error) {
	tag := "bench-" + s.mark
	start := time.Now()
	var booting, answered time.Time
	s.cfg.step("booting %s with %d MiB", s.detail.Image, memoryMiB)
	_, err := s.cfg.Client.CreateSnapshot(ctx, forkd.SnapshotRequest{
		Tag: tag, Image: s.detail.Image, Warm: FirstCall, CPUs: s.detail.CPUs, MemoryMiB: memoryMiB, DiskMiB: s.detail.DiskMiB,
		Labels: map[string]string{markLabel: s.mark},
	}, func(step string, fraction float64) {
		// The steps of a build: an image to be made first, booting, warming, and then
		// what makes a snapshot of it.
		switch {
		case strings.HasPrefix(step, "booting"):
			booting = time.Now()
		case !booting.IsZero() && answered.IsZero() && !strings.HasPrefix(step, "warming"):
			answered = time.Now()
		}
		if s.cfg.Progress != nil {
			s.cfg.Progress(step, fraction)
		}
	})
	if err != nil {
		return ColdBoot{}, "", err
	}
	if booting.IsZero() || answered.IsZero() {
		return ColdBoot{Skipped: "the daemon does not tell the steps of a snapshot build"}, tag, nil
	}
	// Counted from the request unless an image had to be made first.
	if booting.Sub(start) > time.Second {
		start = booting
	}
	return ColdBoot{MS: ptr(millis(answered.Sub(start))), How: coldHow}, tag, nil
}

// coldBoot measures a boot and removes what it made.
func (s *subject) coldBoot(ctx context.Context) (ColdBoot, error) {
	if s.throwaway {
		return s.cold, nil
	}
	if s.detail.Image == "" {
		return ColdBoot{Skipped: "the daemon does not tell the snapshot's image"}, nil
	}
	cold, tag, err := s.boot(ctx, s.memoryMiB)
	if ctx.Err() != nil {
		return ColdBoot{}, err
	}
	if err != nil {
		return ColdBoot{}, errdefs.WithHint(err, "leave the cold boot out with --baselines process,runc")
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTime)
	defer cancel()
	return cold, s.cfg.Client.DeleteSnapshot(clean, tag, forkd.DeleteAlone)
}
