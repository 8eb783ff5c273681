package bench

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"sync"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	forkd "forkd.dev/forkd/sdk/go"
)

// FirstCall is the code that each fork is asked first.
const FirstCall = "import numpy; numpy.__version__"

// cleanUpTime bounds the removal of what a measurement made.
const cleanUpTime = 2 * time.Minute

// Config is what every measurement needs.
type Config struct {
	Client   *forkd.Client
	Progress func(step string, fraction float64) // may be nil
	Command  string                              // as it was typed, for the report
	TempDir  string                              // "" is the system's
	Proc     string                              // "" is /proc

	// counter finds the counter of a guest program in the memory of a machine's
	// process; nil is the real one, tests have others.
	counter func(pid int, marker []byte) (func() (uint64, error), error)
}

func (c Config) step(format string, args ...any) {
	if c.Progress != nil {
		c.Progress(fmt.Sprintf(format, args...), -1)
	}
}

func (c Config) procfs() procfs {
	if c.Proc == "" {
		return "/proc"
	}
	return procfs(c.Proc)
}

// ErrAnswers tells that an answer was wrong or missing.
var ErrAnswers = errors.New("not every fork gave the right answer")

// subject is the snapshot that is measured.
type subject struct {
	cfg       Config
	ref       string // to fork it by
	name      string // for the report
	detail    forkd.SnapshotDetail
	engine    string
	isolation string
	memoryMiB int
	answer    string // the right one to FirstCall
	meter     meter
	group     string // cgroup of the daemon's sandboxes, or ""
	mark      string // label of all that is made for this measurement
	cold      ColdBoot
	throwaway bool
	pools     *forkd.Pool // what was set before, nil if it was not changed
}

// markLabel is the label of sandboxes made for a measurement.
const markLabel = "bench"

// openSubject finds the snapshot, makes one of another memory size if asked for,
// and forks it once: to have the built-in one made, to learn the right answer, and
// to find the daemon. The caller closes it, also if there is an error.
func openSubject(ctx context.Context, cfg Config, ref string, memoryMiB int) (*subject, error) {
	s := &subject{cfg: cfg, ref: ref, name: ref, mark: ident.New("bn")}
	cfg.step("preparing %s", ref)
	if err := s.look(ctx); err != nil {
		return s, err
	}
	if memoryMiB != 0 && memoryMiB != s.memoryMiB {
		if err := s.resize(ctx, memoryMiB); err != nil {
			return s, err
		}
	}
	detail, err := cfg.Client.Snapshot(ctx, s.ref)
	if err != nil {
		return s, err
	}
	s.detail = detail
	return s, nil
}

// look forks one and asks it.
func (s *subject) look(ctx context.Context) error {
	made, err := s.fork(ctx, 1, nil)
	if err != nil {
		return err
	}
	if len(made) != 1 {
		return errdefs.New(errdefs.ErrInternal, "the daemon answered with %d sandboxes instead of 1", len(made))
	}
	sb := made[0]
	s.engine, s.isolation, s.memoryMiB = sb.Engine, sb.Isolation, sb.MemoryMiB
	answer, err := s.ask(ctx, sb.ID)
	if err != nil {
		return fmt.Errorf("ask a fork of %s: %w", s.name, err)
	}
	if !regexp.MustCompile(`^'[0-9]+\.[0-9][0-9a-z.+]*'$`).MatchString(answer) {
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "snapshot %s answers %.80q to %q", s.name, answer, FirstCall),
			"measure a snapshot with Python and numpy")
	}
	s.answer = answer
	s.meter = meter{fs: s.cfg.procfs()}
	if sb.PID != nil {
		s.meter.daemon = s.meter.fs.daemonOf(*sb.PID, sb.ID)
		s.group = s.meter.fs.groupOf(*sb.PID, sb.ID)
	}
	return s.kill(ctx, []string{sb.ID})
}

// resize makes a snapshot of the same image with another memory size, for this
// measurement only.
func (s *subject) resize(ctx context.Context, memoryMiB int) error {
	detail, err := s.cfg.Client.Snapshot(ctx, s.ref)
	if err != nil {
		return err
	}
	if detail.ParentID != "" || detail.Image == "" {
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "snapshot %s has %d MiB and was made from another snapshot", s.name, s.memoryMiB),
			"--memory works with snapshots that were made from an image")
	}
	s.detail = detail
	cold, tag, err := s.boot(ctx, memoryMiB)
	if err != nil {
		return err
	}
	s.ref, s.throwaway, s.memoryMiB, s.cold = tag, true, memoryMiB, cold
	return nil
}

// fork makes n sandboxes; ready, if not nil, is called for each as it comes up.
func (s *subject) fork(ctx context.Context, n int, ready func(index int, sb forkd.Sandbox)) ([]forkd.Sandbox, error) {
	res, err := s.cfg.Client.Fork(ctx, forkd.ForkRequest{
		SnapshotTag: s.ref, N: forkd.Int(n), Labels: map[string]string{markLabel: s.mark}, Partial: n > 1,
	}, &forkd.ForkWatch{Ready: ready, Progress: s.cfg.Progress})
	if err != nil {
		return nil, fmt.Errorf("fork %d of %s: %w", n, s.name, err)
	}
	if len(res.Failures) > 0 && len(res.Sandboxes) == 0 {
		f := res.Failures[0]
		return nil, errdefs.New(errdefs.FromCode(f.Code), "fork %d of %s: none came up: %s", n, s.name, f.Error.Error)
	}
	return res.Sandboxes, nil
}

// ask runs FirstCall in a sandbox and returns the result.
func (s *subject) ask(ctx context.Context, id string) (string, error) {
	return s.eval(ctx, id, FirstCall)
}

// killers is how many sandboxes are ended at a time.
const killers = 8

// kill ends sandboxes, also if ctx has ended.
func (s *subject) kill(ctx context.Context, ids []string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTime)
	defer cancel()
	errs := make([]error, len(ids))
	slots := make(chan struct{}, killers)
	var wg sync.WaitGroup
	for i, id := range ids {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := s.cfg.Client.Kill(ctx, id); err != nil && !errors.Is(err, forkd.ErrNotFound) {
				errs[i] = fmt.Errorf("end sandbox %s: %w", id, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// close removes what is left of the measurement.
func (s *subject) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanUpTime)
	defer cancel()
	list, err := s.cfg.Client.Sandboxes(ctx)
	if err != nil {
		return fmt.Errorf("look for what is left of the measurement: %w", err)
	}
	var left []string
	for _, sb := range list {
		if sb.Labels[markLabel] == s.mark {
			left = append(left, sb.ID)
		}
	}
	errs := []error{s.kill(ctx, left), s.restorePools(ctx)}
	errs = append(errs, s.removeMarked(ctx))
	return errors.Join(errs...)
}
