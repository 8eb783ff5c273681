package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/snapshot"
)

// plan is everything that is known about a snapshot before it is forked. It keeps
// the snapshot from being deleted until release, which deletes it if it only waited
// for that.
type plan struct {
	s         *Service
	id        string
	tag       string // the tag it was asked by, or ""
	manifest  snapshot.Manifest
	chain     []engine.State
	root      engine.Root
	isolation engine.Isolation
	labels    map[string]string // that children have from a source that runs
	cold      bool              // only its disk is used: it may be stale
	release   func()
}

func (p *plan) name() string {
	if p.tag != "" {
		return p.tag
	}
	return p.id
}

// reserveMiB is what a fork is expected to need: where forks share no memory, all of
// the snapshot's as well.
func (p *plan) reserveMiB(ctx context.Context) int {
	if p.s.cfg.Engine.Probe(ctx).SharesMemory {
		return reserveMiB
	}
	var bytes int64
	for _, a := range p.manifest.Artifacts {
		if a.Kind == "memory" {
			bytes += a.Bytes
		}
	}
	return reserveMiB + int((bytes+1<<20-1)>>20)
}

// lease keeps the snapshot for one sandbox.
func (p *plan) lease(sandboxID string) func() { return p.s.leaseFor(p.id, sandboxID) }

func (s *Service) leaseFor(snapshotID, holder string) func() {
	release, err := s.cfg.Store.Lease(snapshotID, holder)
	if err != nil {
		// Only a sandbox whose snapshot has vanished gets here: it goes on from the
		// files it has open.
		s.cfg.Log("lease %s for %s: %v", snapshotID, holder, err)
		return func() {}
	}
	return release
}

// plan resolves the snapshot of f, making a built-in first if it is one.
func (s *Service) plan(ctx context.Context, f Fork) (*plan, error) {
	var labels map[string]string
	id, tag, err := s.resolveSnapshot(ctx, f.Snapshot)
	if isBuiltin(f.Snapshot) && (errors.Is(err, errdefs.ErrNotFound) || err == nil && (s.foreign(ctx, id) || s.spoiled(ctx, id))) {
		id, err = s.ensureBuiltin(ctx, f.Snapshot, f.Progress)
		tag = f.Snapshot
	}
	if errors.Is(err, errdefs.ErrNotFound) {
		if e, sbErr := s.resolve(f.Snapshot); sbErr == nil {
			if id, labels, err = s.branchForFork(ctx, e, f); err == nil {
				defer s.collect(id) // if it cannot be planned
			}
		}
	}
	if err != nil {
		return nil, err
	}
	p, err := s.fill(ctx, &plan{s: s, id: id, cold: f.Cold})
	if err != nil {
		return nil, err
	}
	p.tag, p.labels = tag, labels
	err = errors.Join(checkShape(f.Shape, p.manifest.Shape), checkSecrets("snapshot "+p.name(), p.manifest.HoldsSecrets, f.WithSecrets))
	if err != nil {
		p.release()
		return nil, fmt.Errorf("fork %s: %w", p.name(), err)
	}
	return p, nil
}

// planOf reads what is needed to restore snapshot id.
func (s *Service) planOf(ctx context.Context, id string) (*plan, error) {
	return s.fill(ctx, &plan{s: s, id: id})
}

// planCold reads what is needed to boot from the disk of snapshot id.
func (s *Service) planCold(ctx context.Context, id string) (*plan, error) {
	return s.fill(ctx, &plan{s: s, id: id, cold: true})
}

// fill leases the snapshot of p and reads the rest.
func (s *Service) fill(ctx context.Context, p *plan) (*plan, error) {
	id := p.id
	release, err := s.cfg.Store.Lease(id, callHolder)
	if errors.Is(err, errdefs.ErrNotFound) {
		if row, rowErr := s.cfg.Journal.GetSnapshot(ctx, id); rowErr == nil && row.Status != string(SnapshotReady) {
			return nil, notReady(id, SnapshotStatus(row.Status), row.Reason)
		}
	}
	if err != nil {
		return nil, err
	}
	p.isolation = s.cfg.Engine.Probe(ctx).Isolation
	p.release = func() {
		release()
		s.collect(id)
	}
	if err := s.fillPlan(ctx, p); err != nil {
		p.release()
		return nil, err
	}
	return p, nil
}

// callHolder is the holder of a snapshot that a call under way needs.
const callHolder = "a call under way"

func notReady(id string, status SnapshotStatus, reason string) error {
	if reason != "" {
		reason = ": " + reason
	}
	hint := "look at it with: forkd snapshot info %[1]s"
	if status == SnapshotStale {
		hint += "; boot from its disk with: forkd fork --cold %[1]s"
	}
	return errdefs.WithHint(errdefs.New(errdefs.ErrNotReady, "snapshot %s is %s%s", id, status, reason), hint, id)
}

func (s *Service) fillPlan(ctx context.Context, p *plan) (err error) {
	if p.manifest, err = s.cfg.Store.Get(p.id); err != nil {
		return err
	}
	if err := s.checkEngine(p.manifest); err != nil {
		return fmt.Errorf("snapshot %s: %w", p.id, err)
	}
	status, reason := s.status(ctx, p.manifest)
	if usable := status == SnapshotReady || p.cold && status == SnapshotStale; !usable {
		return notReady(p.id, status, reason)
	}
	if p.chain, err = s.cfg.Store.States(p.id); err != nil {
		return err
	}
	p.root, err = s.cfg.Images.Root(ctx, p.manifest.Image.ID)
	return err
}

// checkShape compares what a fork asks for with what its snapshot has.
func checkShape(asked, has engine.Shape) error {
	bad := func(what string, got, want int) error {
		return errdefs.WithHint(errdefs.New(errdefs.ErrInvalid, "%s of %d asked for, but the snapshot has %d: sizes are fixed when it is captured", what, got, want),
			"make a snapshot of that size: forkd snapshot --cpus --memory --disk")
	}
	switch {
	case asked.CPUs != 0 && asked.CPUs != has.CPUs:
		return bad("a CPU count", asked.CPUs, has.CPUs)
	case asked.MemoryMiB != 0 && asked.MemoryMiB != has.MemoryMiB:
		return bad("memory in MiB", asked.MemoryMiB, has.MemoryMiB)
	case asked.DiskMiB != 0 && asked.DiskMiB != has.DiskMiB:
		return bad("a disk in MiB", asked.DiskMiB, has.DiskMiB)
	}
	return nil
}

// checkEngine refuses a snapshot of another engine: what one captured no other can restore.
func (s *Service) checkEngine(m snapshot.Manifest) error {
	if mine := s.cfg.Engine.Name(); m.Compat.Engine != mine {
		return errdefs.WithHint(errdefs.New(errdefs.ErrIncompatible, "it belongs to engine %s, and this daemon runs engine %s", m.Compat.Engine, mine),
			"start the daemon with --engine %s, or make it for this engine, too: forkd snapshot rebuild %s", m.Compat.Engine, m.ID)
	}
	return nil
}

// foreign tells whether snapshot id is known to be of another engine.
func (s *Service) foreign(ctx context.Context, id string) bool {
	if m, err := s.cfg.Store.Get(id); err == nil {
		return s.checkEngine(m) != nil
	}
	row, err := s.cfg.Journal.GetSnapshot(ctx, id)
	return err == nil && row.Engine != "" && row.Engine != s.cfg.Engine.Name()
}

// resolveSnapshot finds the id that ref means: a tag, an id or a unique prefix. Of a
// tag that several engines have it is the one of ours.
func (s *Service) resolveSnapshot(ctx context.Context, ref string) (id, tag string, err error) {
	if err := ident.CheckRef(ref); err != nil {
		return "", "", err
	}
	found, err := s.cfg.Journal.FindTag(ctx, ref, s.cfg.Engine.Name())
	if err == nil {
		return found.SnapshotID, ref, nil
	}
	if !errors.Is(err, errdefs.ErrNotFound) {
		return "", "", err
	}
	rows, err := s.cfg.Journal.ListSnapshots(ctx)
	if err != nil {
		return "", "", err
	}
	ids := make([]string, 0, len(rows))
	for _, r := range rows {
		ids = append(ids, r.ID)
	}
	kind := ident.Snapshot
	if strings.HasPrefix(ref, string(ident.Checkpoint)) {
		kind = ident.Checkpoint
	}
	id, err = pick(kind, "snapshot", ref, ids)
	if err != nil {
		return "", "", errdefs.WithHint(err, "list them with: forkd snapshot ls")
	}
	return id, "", nil
}
