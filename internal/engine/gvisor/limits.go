package gvisor

import (
	"context"
	"errors"
	"fmt"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux/cgroup"
)

// limiter gives each machine a control group named after its id.
type limiter struct {
	parent      string // "forkd-<installation>"
	unavailable string // why there are no control groups here, or ""
}

// Defaults of engine.Limits. The user-space kernel needs memory for itself beside the
// guest's; each guest process is a process of the host, its threads are threads, and
// the kernel has some tens of its own.
const (
	extraMemoryMiB = 256
	defaultPIDs    = 2048
)

// minMemoryLimitMiB is what an idle fork of a small guest has been seen to need,
// with room for its first answer.
const minMemoryLimitMiB = 128

func newLimiter(installation string) limiter {
	l := limiter{parent: "forkd-" + installation}
	layout, err := cgroup.Describe()
	switch {
	case err != nil:
		l.unavailable = err.Error()
	case len(layout.Writable("memory", "pids")) < 2: // cpu is needed only where asked for
		l.unavailable = "the memory and pids controllers are not writable"
	}
	return l
}

// lost says in words what is not limited here.
func (l limiter) lost() string {
	if l.unavailable == "" {
		return ""
	}
	return "cgroup limits on memory and processes (" + l.unavailable + ")"
}

// make makes the group of a machine and returns what puts a process into it, or nil
// without control groups. A limit that was asked for and cannot be applied is an
// error; the defaults are then left out.
func (l limiter) make(spec engine.Spec) (enter func(pid int) error, err error) {
	if l.unavailable != "" {
		if spec.Limits == (engine.Limits{}) {
			return nil, nil
		}
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "limit %s: %s", spec.ID, l.unavailable),
			"run the daemon as root, or in a group of its own: systemd-run --user --scope -p Delegate=yes forkd serve")
	}
	limits := groupLimits(spec.Limits)
	if limits.MemoryBytes == 0 {
		limits.MemoryBytes = int64(spec.Shape.MemoryMiB+extraMemoryMiB) << 20
	}
	if limits.PIDs == 0 {
		limits.PIDs = defaultPIDs
	}
	g, err := cgroup.Create(l.parent, spec.ID, limits)
	if err != nil {
		return nil, fmt.Errorf("limit %s: %w", spec.ID, err)
	}
	return func(pid int) error {
		if err := g.AddProcess(pid); err != nil {
			return fmt.Errorf("limit %s: %w", spec.ID, err)
		}
		return nil
	}, nil
}

func groupLimits(l engine.Limits) cgroup.Limits {
	return cgroup.Limits{MemoryBytes: int64(l.MemoryMiB) << 20, PIDs: l.PIDs, CPUPercent: l.CPUPercent}
}

var _ engine.Limiter = (*Driver)(nil)

// Limit gives a machine other limits than it was made with.
func (d *Driver) Limit(_ context.Context, id string, limits engine.Limits) error {
	d.mu.Lock()
	m := d.machines[id]
	d.mu.Unlock()
	if m == nil {
		return errdefs.New(errdefs.ErrNotFound, "limit %s: there is no such machine", id)
	}
	g, err := d.limits.open(id)
	if err == nil {
		err = g.Change(groupLimits(limits), m.rec.PID)
	}
	if err != nil {
		return fmt.Errorf("limit %s: %w", id, err)
	}
	return nil
}

// open finds the group of machine id.
func (l limiter) open(id string) (cgroup.Group, error) {
	if l.unavailable != "" {
		return cgroup.Group{}, errdefs.New(errdefs.ErrUnsupported, "%s", l.unavailable)
	}
	return cgroup.Open(l.parent, id)
}

// oomKilled tells whether the kernel killed a process of machine id at its memory limit.
func (l limiter) oomKilled(id string) bool {
	g, err := l.open(id)
	if err != nil {
		return false
	}
	n, err := g.OOMKills()
	return err == nil && n > 0
}

// free ends what is left in the control group of a machine and removes it.
func (l limiter) free(ctx context.Context, id string) error {
	g, err := l.open(id)
	if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrUnsupported) {
		return nil
	}
	if err == nil {
		err = g.Kill(ctx)
	}
	if err == nil {
		err = g.Remove(ctx)
	}
	if err != nil {
		return fmt.Errorf("remove control group of %s: %w", id, err)
	}
	return nil
}
