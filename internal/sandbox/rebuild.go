package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/store/snapshot"
)

// RebuildSnapshot makes a snapshot again from its recipe. The new one gets all tags of
// the old one, which goes unless something uses it or it is of another engine: then
// this one gets its own beside it.
func (s *Service) RebuildSnapshot(ctx context.Context, ref string, progress Progress) (Snapshot, error) {
	id, tag, err := s.resolveSnapshot(ctx, ref)
	if isBuiltin(ref) && (errors.Is(err, errdefs.ErrNotFound) || err == nil && s.foreign(ctx, id)) {
		id, err = s.ensureBuiltin(ctx, ref, progress)
		if err != nil {
			return Snapshot{}, err
		}
		return s.Snapshot(ctx, id)
	}
	if err != nil {
		return Snapshot{}, err
	}
	sn, err := s.rebuild(ctx, id, tag, progress)
	if err != nil {
		return Snapshot{}, fmt.Errorf("rebuild snapshot %s: %w", ref, err)
	}
	return sn, nil
}

func (s *Service) rebuild(ctx context.Context, id, tag string, progress Progress) (Snapshot, error) {
	m, err := s.cfg.Store.Get(id)
	if err != nil {
		return Snapshot{}, err
	}
	if err := s.rebuildable(m); err != nil {
		return Snapshot{}, err
	}
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	mine := tags[id]
	if tag == "" && len(mine) > 0 {
		tag = mine[0]
	}
	req := createFrom(m)
	req.Tag, req.Replace = tag, true
	if _, builtin := req.Labels[builtinLabel]; builtin {
		req.Labels = maps.Clone(req.Labels)
		req.Labels[builtinLabel] = s.builtinMark()
	}
	sn, err := s.CreateSnapshot(ctx, req, progress)
	if err != nil {
		return Snapshot{}, err
	}
	for _, other := range mine {
		if err := s.TagSnapshot(ctx, sn.ID, other, true); err != nil {
			return Snapshot{}, err
		}
	}
	if m.Compat.Engine != s.cfg.Engine.Name() {
		return s.Snapshot(ctx, sn.ID)
	}
	// It stays if sandboxes run on it or snapshots lie on it.
	if err := s.DeleteSnapshot(ctx, id, Delete{}); err != nil && !errors.Is(err, errdefs.ErrConflict) && !errors.Is(err, errdefs.ErrNotFound) {
		s.cfg.Log("remove the rebuilt snapshot %s: %v", id, err)
	}
	return s.Snapshot(ctx, sn.ID)
}

// createFrom is the request that made m.
func createFrom(m snapshot.Manifest) CreateSnapshot {
	r := m.Recipe
	req := CreateSnapshot{
		Image: r.Image, From: r.From, Warm: r.Warm, Exec: r.Exec, AllowHosts: r.AllowHosts,
		Labels: maps.Clone(m.Labels),
	}
	if r.From == "" {
		req.Shape = m.Shape
	}
	if r.Start != nil {
		req.Start = &Start{
			Command: r.Start.Command, Ready: r.Start.Ready, ReadyPort: r.Start.ReadyPort, ReadyLog: r.Start.ReadyLog,
			ReadyTimeout: time.Duration(r.Start.ReadyTimeout * float64(time.Second)),
			Env:          maps.Clone(r.Start.Env), Cwd: r.Start.Cwd, User: r.Start.User,
		}
	}
	return req
}

// spoiled tells whether the built-in snapshot id is one that this host cannot restore
// any more, so that it is made anew.
func (s *Service) spoiled(ctx context.Context, id string) bool {
	m, err := s.cfg.Store.Get(id)
	if err != nil || m.Labels[builtinLabel] == "" {
		return false
	}
	if build := s.cfg.AgentBuild; build != "" && m.Labels[builtinLabel] != build {
		return true // it holds the agent of another build
	}
	status, _ := s.status(ctx, m)
	return status == SnapshotStale || status == SnapshotFailed
}
