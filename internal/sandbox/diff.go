package sandbox

import (
	"context"
	"fmt"
	"path"
	"time"

	"golang.org/x/sync/errgroup"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/guest"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/snapshot"
)

// DiffRequest asks what differs between two snapshots, checkpoints or running
// sandboxes. A running one is captured first and goes on.
type DiffRequest struct {
	A, B    string   // references
	Patch   bool     // with a unified diff of text files
	Exclude []string // directories to leave out, besides those of the kernel
}

// Diff is what differs.
type Diff struct {
	A, B      DiffSide
	Changes   []Change
	Truncated bool // there are more changes than are listed

	ProcessesAdded, ProcessesRemoved []agentwire.ProcessEntry

	Patch        string
	PatchSkipped int // files without a place in Patch: too large, or no text
	Warnings     []string
	Duration     time.Duration
}

// DiffSide is one of the two that are compared.
type DiffSide struct {
	SnapshotID string // what was looked at
	Files      int
	Processes  int
	Memory     agentwire.MemoryTotals
}

// diffTimeout bounds a comparison.
const diffTimeout = 15 * time.Minute

// alwaysExcluded are file systems of the kernel. They are others than the root's and
// not looked at anyway, except where an image has files below their mount points.
var alwaysExcluded = []string{"/proc", "/sys", "/dev", "/run"}

// Diff compares two states. Each is restored into a throw-away machine in which no
// process of the user runs: its agent, which waits for an identity, tells what there
// is. Neither state changes.
func (s *Service) Diff(ctx context.Context, req DiffRequest, progress Progress) (Diff, error) {
	began := time.Now()
	if progress == nil {
		progress = func(string, float64) {}
	}
	exclude, err := excludes(req.Exclude)
	if err != nil {
		return Diff{}, err
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return Diff{}, err
	}
	defer done()
	ctx, cancel := context.WithTimeout(ctx, diffTimeout)
	defer cancel()
	sides, release, err := s.diffSides(ctx, req, progress)
	if err != nil {
		return Diff{}, err
	}
	defer release()
	c := &comparison{ctx: ctx, a: sides[0].look, b: sides[1].look, exclude: exclude, progress: progress}
	d, err := c.diff(req.Patch)
	if err != nil {
		return Diff{}, fmt.Errorf("compare %s with %s: %w", req.A, req.B, err)
	}
	d.A.SnapshotID, d.B.SnapshotID = sides[0].plan.id, sides[1].plan.id
	for _, side := range sides {
		if m := side.plan.manifest; m.Disk == snapshot.DiskJournal {
			d.Warnings = append(d.Warnings, m.ID+" was captured without writing its file systems out: its files are compared as the guest's memory has them, its disk may lack some of that")
		}
	}
	d.Duration = time.Since(began)
	return d, nil
}

// diff fills the result.
func (c *comparison) diff(patch bool) (d Diff, err error) {
	if err := c.run(); err != nil {
		return d, err
	}
	if err := c.processes(&d); err != nil {
		return d, err
	}
	d.A.Files, d.B.Files = c.filesA, c.filesB
	d.Changes, d.Truncated = c.changes, c.truncated
	if patch {
		d.Patch, d.PatchSkipped, err = c.patch()
	}
	return d, err
}

func excludes(given []string) ([]string, error) {
	out := append([]string(nil), alwaysExcluded...)
	for _, dir := range given {
		if !path.IsAbs(dir) || path.Clean(dir) != dir || dir == "/" {
			return nil, errdefs.New(errdefs.ErrInvalid, "cannot leave out %.200q: it is not a plain absolute path", dir)
		}
		out = append(out, dir)
	}
	return out, nil
}

// diffSide is one state under comparison, in a machine of its own.
type diffSide struct {
	plan    *plan
	machine string
	link    *link
	look    *guest.Inspector
}

// diffSides prepares both states. release gives back all that this took.
func (s *Service) diffSides(ctx context.Context, req DiffRequest, progress Progress) (sides [2]*diffSide, release func(), err error) {
	var undo []func()
	release = func() {
		for i := range undo {
			undo[len(undo)-1-i]()
		}
	}
	if err := s.prepareSides(ctx, req, progress, &sides, func(fn func()) { undo = append(undo, fn) }); err != nil {
		release()
		return sides, nil, err
	}
	return sides, release, nil
}

func (s *Service) prepareSides(ctx context.Context, req DiffRequest, progress Progress, sides *[2]*diffSide, later func(func())) error {
	for i, ref := range []string{req.A, req.B} {
		p, err := s.plan(ctx, Fork{Snapshot: ref, WithSecrets: true, Progress: progress})
		if err != nil {
			return err
		}
		later(func() {
			p.release()
			s.collect(p.id)
		})
		sides[i] = &diffSide{plan: p}
	}
	room, err := s.admit(ctx, demand{what: "compare", n: 2, eachMiB: max(sides[0].plan.reserveMiB(ctx), sides[1].plan.reserveMiB(ctx))})
	if err != nil {
		return err
	}
	later(room.release)
	progress("restoring both", -1)
	later(func() { s.endSides(*sides) })
	var g errgroup.Group
	for _, side := range sides {
		g.Go(func() error { return s.lookInto(ctx, side) })
	}
	return g.Wait()
}

// lookInto restores a state into a machine that never gets an identity, and opens an
// inspector in it.
func (s *Service) lookInto(ctx context.Context, side *diffSide) error {
	if err := s.restores.Acquire(ctx, 1); err != nil {
		return err
	}
	defer s.restores.Release(1)
	id := ident.New(ident.Sandbox)
	spec, err := s.newSpec(id, side.plan.manifest.Shape, side.plan.root, 0)
	if err != nil {
		return err
	}
	side.machine = id
	m, err := s.cfg.Engine.Restore(ctx, spec, side.plan.chain)
	if err != nil {
		return fmt.Errorf("restore %s: %w", side.plan.name(), err)
	}
	side.link = newLink(m, s.cfg.Connect, helloTimeout)
	if err := m.Resume(ctx); err != nil {
		return fmt.Errorf("restore %s: %w", side.plan.name(), err)
	}
	agent, err := side.link.get(ctx)
	if err != nil {
		return err
	}
	side.look, err = guest.OpenInspector(ctx, agent)
	return err
}

// endSides ends the throw-away machines.
func (s *Service) endSides(sides [2]*diffSide) {
	for _, side := range sides {
		var err error
		if side.look != nil {
			_ = side.look.Close() // the machine goes next
		}
		if side.link != nil {
			side.link.close()
		}
		if side.machine != "" {
			err = s.discard(side.machine)
		}
		if err != nil {
			s.cfg.Log("end a machine of a comparison: %v", err)
		}
	}
}

var _ looker = (*guest.Inspector)(nil)
