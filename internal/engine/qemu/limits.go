package qemu

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

// translationMiB bounds the code that QEMU translates before it starts anew; left
// to itself it takes up to a GiB, as a guest runs more and more different programs.
const translationMiB = 256

// Defaults of engine.Limits. QEMU needs memory for translated code and buffers
// beside the guest's, and a thread per CPU and disk request. The guest's memory
// counts twice: the first write to a page that is a hole in the memory image fills
// the hole too, and both are charged to who writes.
const (
	extraMemoryMiB = translationMiB + 256
	defaultPIDs    = 128
)

// minMemoryLimitMiB is what an idle fork of a small guest has been seen to need,
// with room for its first answer.
const minMemoryLimitMiB = 96

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

// apply puts a started process into its group. A limit that was asked for and
// cannot be applied is an error; the defaults are then left out.
func (l limiter) apply(spec engine.Spec, pid int) error {
	asked := spec.Limits != (engine.Limits{})
	if l.unavailable != "" {
		if asked {
			return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "limit %s: %s", spec.ID, l.unavailable),
				"run the daemon as root, or in a group of its own: systemd-run --user --scope -p Delegate=yes forkd serve")
		}
		return nil
	}
	limits := groupLimits(spec.Limits)
	if limits.MemoryBytes == 0 {
		limits.MemoryBytes = int64(2*spec.Shape.MemoryMiB+extraMemoryMiB) << 20
	}
	if limits.PIDs == 0 {
		limits.PIDs = defaultPIDs
	}
	g, err := cgroup.Create(l.parent, spec.ID, limits)
	if err != nil {
		return fmt.Errorf("limit %s: %w", spec.ID, err)
	}
	if err := g.AddProcess(pid); errors.Is(err, errdefs.ErrNotFound) {
		return errdefs.New(errdefs.ErrUnavailable, "limit %s: its process %d has just ended", spec.ID, pid)
	} else if err != nil {
		return fmt.Errorf("limit %s: %w", spec.ID, err)
	}
	return nil
}

// oomKilled tells whether the kernel killed machine id at its memory limit.
func (d *Driver) oomKilled(id string) bool {
	g, err := cgroup.Open(d.limits.parent, id)
	if err != nil {
		return false
	}
	n, err := g.OOMKills()
	return err == nil && n > 0
}

// freeLimits removes the control group of a machine that has ended.
func (d *Driver) freeLimits(ctx context.Context, id string) error {
	g, err := cgroup.Open(d.limits.parent, id)
	if errors.Is(err, errdefs.ErrNotFound) || errors.Is(err, errdefs.ErrUnsupported) {
		return nil
	}
	if err == nil {
		err = g.Remove(ctx)
	}
	if err != nil {
		return fmt.Errorf("remove control group of %s: %w", id, err)
	}
	return nil
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
	if d.limits.unavailable != "" {
		return errdefs.New(errdefs.ErrUnsupported, "limit %s: %s", id, d.limits.unavailable)
	}
	g, err := cgroup.Open(d.limits.parent, id)
	if err == nil {
		err = g.Change(groupLimits(limits), m.rec.PID)
	}
	if err != nil {
		return fmt.Errorf("limit %s: %w", id, err)
	}
	return nil
}
