package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// Compact asks for a snapshot that is the same as another but needs no ancestor.
type Compact struct {
	From    string // reference
	To      string // tag of the result
	Replace bool   // move the tag if it is taken
	// WithSecrets agrees to name a memory that holds secrets.
	WithSecrets bool
}

// CompactSnapshot makes a snapshot that equals c.From and has no parent. c.From stays.
func (s *Service) CompactSnapshot(ctx context.Context, c Compact, progress Progress) (Snapshot, error) {
	if progress == nil {
		progress = func(string, float64) {}
	}
	if c.To == "" {
		return Snapshot{}, errdefs.New(errdefs.ErrInvalid, "compact snapshot %s: the result needs a tag", c.From)
	}
	if c.To == c.From {
		return Snapshot{}, errdefs.New(errdefs.ErrInvalid, "compact snapshot %s: the result cannot have the same tag", c.From)
	}
	ctx, done, err := s.begin(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	defer done()
	id, err := s.compact(ctx, c, progress)
	if err != nil {
		return Snapshot{}, fmt.Errorf("compact snapshot %s: %w", c.From, err)
	}
	return s.Snapshot(context.WithoutCancel(ctx), id)
}

func (s *Service) compact(ctx context.Context, c Compact, progress Progress) (string, error) {
	compactor, ok := s.cfg.Engine.(engine.Compactor)
	if !ok {
		return "", errdefs.New(errdefs.ErrUnsupported, "engine %s stores nothing that could be compacted", s.cfg.Engine.Name())
	}
	if err := s.checkNewTag(ctx, c.To, c.Replace); err != nil {
		return "", err
	}
	from, _, err := s.resolveSnapshot(ctx, c.From)
	if err != nil {
		return "", err
	}
	p, err := s.planOf(ctx, from)
	if err != nil {
		return "", err
	}
	defer p.release()
	if err := checkSecrets("snapshot "+p.name(), p.manifest.HoldsSecrets, c.WithSecrets); err != nil {
		return "", err
	}
	if err := s.checkSpace("compact a snapshot", s.chainBytes(p.chain)); err != nil {
		return "", err
	}
	st, err := s.cfg.Store.Stage(ident.New(ident.Snapshot))
	if err != nil {
		return "", err
	}
	progress("merging layers", -1)
	artifacts, err := compactor.Compact(ctx, engine.Compaction{Chain: p.chain, Dir: st.Dir()})
	if err == nil {
		progress("checking that it restores", -1)
		err = s.publishCopy(ctx, st, copied{from: p, manifest: compacted(p.manifest, artifacts), tag: c.To, replace: c.Replace})
	}
	if err != nil {
		return "", errors.Join(err, st.Discard())
	}
	return st.ID(), nil
}

// chainBytes is the disk space of all states of chain.
func (s *Service) chainBytes(chain []engine.State) int64 {
	var sum int64
	for _, st := range chain {
		for _, a := range st.Artifacts {
			sum += a.Bytes
		}
	}
	return sum
}

// compacted is the manifest of m without its parent. What was true only of m's place
// and time is left out of the labels.
func compacted(m snapshot.Manifest, artifacts []engine.Artifact) snapshot.Manifest {
	labels := maps.Clone(m.Labels)
	for _, l := range []string{labelAnonymous, labelAutoTag, labelExpires, labelCheckpointOf, labelMadeFrom, builtinLabel} {
		delete(labels, l)
	}
	m.Labels = withLabels(labels, map[string]string{labelCompactedFrom: m.ID})
	m.ID, m.ParentID, m.CreatedAt, m.Artifacts = "", "", time.Now().UTC(), nil
	for _, a := range artifacts {
		m.Artifacts = append(m.Artifacts, snapshot.Artifact{Artifact: a})
	}
	return m
}

// copied is a snapshot whose files are complete and that is to be published.
type copied struct {
	from     *plan // whose image and shape it has
	manifest snapshot.Manifest
	tag      string
	replace  bool
}

// publishCopy publishes a staged snapshot once it restores. On an error nothing is
// left of it but what the caller discards.
func (s *Service) publishCopy(ctx context.Context, st *snapshot.Staging, c copied) error {
	row := metadata.Snapshot{ID: st.ID(), Status: string(SnapshotBuilding), Engine: c.manifest.Compat.Engine, CreatedAt: c.manifest.CreatedAt}
	if err := s.cfg.Journal.PutSnapshot(ctx, row); err != nil {
		return err
	}
	clean := context.WithoutCancel(ctx)
	if _, err := st.Publish(ctx, c.manifest); err != nil {
		return errors.Join(err, s.cfg.Journal.DeleteSnapshot(clean, st.ID()))
	}
	err := s.tryRestore(ctx, st.ID(), c.manifest.Shape, c.from.root)
	if err != nil {
		err = fmt.Errorf("the snapshot does not restore: %w", err)
	} else {
		row.Status = string(SnapshotReady)
		err = s.cfg.Journal.PublishSnapshot(ctx, row, c.tag, tagPolicy(c.replace))
	}
	if err != nil {
		return errors.Join(err, s.removeSnapshot(clean, st.ID()))
	}
	return nil
}
