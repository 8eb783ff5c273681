package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	forkd "forkd.dev/forkd/sdk/go"
)

// About is what every report of captures says of its measurement.
type About struct {
	Bench     string  `json:"bench"`
	Engine    string  `json:"engine"`
	Isolation string  `json:"isolation"`
	Snapshot  string  `json:"snapshot"`
	MemoryMiB int     `json:"memory_mib"`
	Command   string  `json:"command"`
	Machine   Machine `json:"machine"`
}

func (s *subject) about(bench string, m Machine) About {
	return About{
		Bench: bench, Engine: s.engine, Isolation: s.isolation, Snapshot: s.name, MemoryMiB: s.memoryMiB, Command: s.cfg.Command, Machine: m,
	}
}

// openQuiet opens a subject without prepared machines, whose refill would disturb.
// The caller closes it, also if there is an error.
func openQuiet(ctx context.Context, cfg Config, ref string, memoryMiB int) (*subject, Machine, error) {
	m := probeMachine(ctx, cfg)
	s, err := openSubject(ctx, cfg, ref, memoryMiB)
	if err != nil {
		return s, m, err
	}
	if err := s.savePools(ctx); err != nil {
		return s, m, err
	}
	return s, m, s.emptyPools(ctx)
}

// of is the same measurement with another snapshot to fork.
func (s *subject) of(ref string) *subject {
	other := *s
	other.ref, other.name = ref, ref
	return &other
}

// source forks one sandbox of the subject.
func (s *subject) source(ctx context.Context) (forkd.Sandbox, error) {
	made, err := s.fork(ctx, 1, nil)
	if err != nil {
		return forkd.Sandbox{}, err
	}
	if len(made) != 1 {
		return forkd.Sandbox{}, errdefs.New(errdefs.ErrInternal, "the daemon answered with %d sandboxes instead of 1", len(made))
	}
	return made[0], nil
}

// eval runs code in the warm runner of a sandbox and returns the result.
func (s *subject) eval(ctx context.Context, id, code string) (string, error) {
	res, err := s.cfg.Client.Eval(ctx, id, forkd.EvalRequest{Code: code})
	switch {
	case err != nil:
		return "", err
	case res.Error != nil:
		return "", errdefs.New(errdefs.ErrGuest, "%.200s", *res.Error)
	case res.Result == nil:
		return "", errdefs.New(errdefs.ErrGuest, "no result")
	}
	return *res.Result, nil
}

// dirty writes something new to every page of mib MiB of a sandbox's memory, always
// the same ones for the same part.
func (s *subject) dirty(ctx context.Context, id string, mib, part int, stamp int) error {
	code := fmt.Sprintf(`
import numpy
try:
    bench_parts
except NameError:
    bench_parts = {}
if %[2]d not in bench_parts:
    bench_parts[%[2]d] = numpy.zeros(%[1]d << 20, dtype=numpy.uint8)
bench_parts[%[2]d][::4096] = %[3]d
bench_parts[%[2]d][1::4096] = %[4]d
'dirty'`, mib, part, stamp%255+1, stamp/255%255)
	if answer, err := s.eval(ctx, id, code); err != nil || answer != "'dirty'" {
		return fmt.Errorf("write %d MiB in %s: %w", mib, id, cmpErr(err, errdefs.New(errdefs.ErrGuest, "answered %.80q", answer)))
	}
	return nil
}

// readyLimit bounds the wait for a capture to be written.
const readyLimit = 5 * time.Minute

// ready waits until a snapshot is written and proven.
func (s *subject) ready(ctx context.Context, id string) (forkd.Snapshot, error) {
	return s.settled(ctx, id, func() (forkd.Snapshot, error) {
		detail, err := s.cfg.Client.Snapshot(ctx, id)
		return detail.Snapshot, err
	})
}

// readyCheckpoint waits until a checkpoint is written and proven.
func (s *subject) readyCheckpoint(ctx context.Context, sandbox, id string) error {
	_, err := s.settled(ctx, id, func() (forkd.Snapshot, error) {
		list, err := s.cfg.Client.Checkpoints(ctx, sandbox)
		if err != nil {
			return forkd.Snapshot{}, err
		}
		for _, sn := range list {
			if sn.ID == id {
				return sn, nil
			}
		}
		// It is listed once it is written.
		detail, err := s.cfg.Client.Snapshot(ctx, id)
		return detail.Snapshot, err
	})
	return err
}

func (s *subject) settled(ctx context.Context, id string, look func() (forkd.Snapshot, error)) (forkd.Snapshot, error) {
	limit := time.NewTimer(readyLimit)
	defer limit.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		sn, err := look()
		switch {
		case err != nil:
			return sn, fmt.Errorf("wait for %s: %w", id, err)
		case sn.Status == "ready":
			return sn, nil
		case sn.Status == "failed", sn.Status == "stale":
			return sn, errdefs.New(errdefs.ErrInternal, "snapshot %s is %s: %s", id, sn.Status, sn.Warning)
		}
		select {
		case <-tick.C:
		case <-limit.C:
			return sn, errdefs.New(errdefs.ErrTimeout, "snapshot %s is still %s after %s", id, sn.Status, readyLimit)
		case <-ctx.Done():
			return sn, ctx.Err()
		}
	}
}

// removeMarked deletes the snapshots made for the measurement, children before their
// parents.
func (s *subject) removeMarked(ctx context.Context) error {
	for {
		list, err := s.cfg.Client.Snapshots(ctx)
		if err != nil {
			return fmt.Errorf("look for what is left of the measurement: %w", err)
		}
		removed := 0
		var errs []error
		for i := len(list) - 1; i >= 0; i-- {
			if list[i].Labels[markLabel] != s.mark {
				continue
			}
			switch err := s.cfg.Client.DeleteSnapshot(ctx, list[i].ID, forkd.DeleteAlone); {
			case err == nil || errors.Is(err, forkd.ErrNotFound):
				removed++
			default:
				errs = append(errs, fmt.Errorf("delete snapshot %s: %w", list[i].ID, err))
			}
		}
		if len(errs) == 0 || removed == 0 {
			return errors.Join(errs...)
		}
	}
}
