// Package limit gives each machine of an engine a control group named after its id.
package limit

import (
	"context"
	"errors"
	"fmt"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux/cgroup"
)

// Limiter makes and removes the groups of one installation.
type Limiter struct {
	parent      string
	unavailable string // why there are no control groups here, or ""
}

// New looks what this host allows.
func New(installation string) Limiter {
	l := Limiter{parent: "forkd-" + installation}
	layout, err := cgroup.Describe()
	switch {
	case err != nil:
		l.unavailable = err.Error()
	case len(layout.Writable("memory", "pids")) < 2: // cpu is needed only where asked for
		l.unavailable = "the memory and pids controllers are not writable"
	}
	return l
}

// Lost says in words what is not limited here, or "".
func (l Limiter) Lost() string {
	if l.unavailable == "" {
		return ""
	}
	return "cgroup limits on memory and processes (" + l.unavailable + ")"
}

// Apply puts a started process into the group of machine id. A limit that was asked for and
// cannot be applied is an error; defaults are then left out.
func (l Limiter) Apply(id string, limits cgroup.Limits, asked bool, pid int) error {
	if l.unavailable != "" {
		if asked {
			return errdefs.WithHint(errdefs.New(errdefs.ErrUnsupported, "limit %s: %s", id, l.unavailable),
				"run the daemon as root, or in a group of its own: systemd-run --user --scope -p Delegate=yes forkd serve")
		}
		return nil
	}
	g, err := cgroup.Create(l.parent, id, limits)
	if err != nil {
		return fmt.Errorf("limit %s: %w", id, err)
	}
	if err := g.AddProcess(pid); errors.Is(err, errdefs.ErrNotFound) {
		return errdefs.New(errdefs.ErrUnavailable, "limit %s: its process %d has just ended", id, pid)
	} else if err != nil {
		return fmt.Errorf("limit %s: %w", id, err)
	}
	return nil
}

// Change gives a machine other limits than it was made with; pid is its process.
func (l Limiter) Change(id string, limits cgroup.Limits, pid int) error {
	if l.unavailable != "" {
		return errdefs.New(errdefs.ErrUnsupported, "limit %s: %s", id, l.unavailable)
	}
	g, err := cgroup.Open(l.parent, id)
	if err == nil {
		err = g.Change(limits, pid)
	}
	if err != nil {
		return fmt.Errorf("limit %s: %w", id, err)
	}
	return nil
}

// Group are the limits of a control group that were asked for.
func Group(l engine.Limits) cgroup.Limits {
	return cgroup.Limits{MemoryBytes: int64(l.MemoryMiB) << 20, PIDs: l.PIDs, CPUPercent: l.CPUPercent}
}

// OOMKilled tells whether the kernel killed machine id at its memory limit.
func (l Limiter) OOMKilled(id string) bool {
	g, err := cgroup.Open(l.parent, id)
	if err != nil {
		return false
	}
	n, err := g.OOMKills()
	return err == nil && n > 0
}

// Free removes the control group of a machine that has ended. It may be repeated.
func (l Limiter) Free(ctx context.Context, id string) error {
	g, err := cgroup.Open(l.parent, id)
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
