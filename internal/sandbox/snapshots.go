package sandbox

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/store/metadata"
	"forkd.dev/forkd/internal/store/snapshot"
)

// manifest describes what b captured.
func (b *builder) manifest(res engine.CaptureResult, pong agentwire.Pong) (snapshot.Manifest, error) {
	compat, err := b.s.cfg.Engine.Compat(b.root)
	if err != nil {
		return snapshot.Manifest{}, err
	}
	m := snapshot.Manifest{
		ID: b.id, CreatedAt: time.Now().UTC(),
		Image:     snapshot.Image{ID: b.image.ID, Name: b.image.Name, Digest: b.image.Digest},
		Compat:    compat,
		Isolation: b.s.cfg.Engine.Probe(context.Background()).Isolation,
		Shape:     b.shape,
		Labels:    b.req.Labels,
		Recipe:    b.recipe(),
		Agent: snapshot.Agent{
			Protocol: pong.ProtocolVersion, WarmLanguages: pong.Runners,
			// A started program would see the throw-away identity of a prepared copy.
			RunnerQuiet: pong.Threads == 0 && pong.Children == 0 && !b.startedProgram(),
		},
		Disk:    snapshot.DiskSynced,
		PauseMs: float64(res.Pause.Microseconds()) / 1000,
	}
	for _, a := range res.Artifacts {
		m.Artifacts = append(m.Artifacts, snapshot.Artifact{Artifact: a})
	}
	if b.parent != nil {
		m.ParentID, m.Image = b.parent.id, b.parent.manifest.Image
		m.HoldsSecrets = b.parent.manifest.HoldsSecrets
	}
	return m, nil
}

// What forks have of the memory of their snapshot.
const (
	MemoryShared = "shared copy-on-write"
	MemoryCopied = "full copy"
)

// status is how usable a stored snapshot is on this host now.
func (s *Service) status(ctx context.Context, m snapshot.Manifest) (SnapshotStatus, string) {
	row, err := s.cfg.Journal.GetSnapshot(ctx, m.ID)
	if err == nil && row.Status != string(SnapshotReady) {
		return SnapshotStatus(row.Status), row.Reason
	}
	if err := s.checkEngine(m); err != nil {
		return SnapshotStale, err.Error()
	}
	if err := s.cfg.Engine.CheckCompat(m.Compat); err != nil {
		return SnapshotStale, err.Error()
	}
	return SnapshotReady, ""
}

// Snapshots lists all snapshots, oldest first.
func (s *Service) Snapshots(ctx context.Context) ([]Snapshot, error) {
	all := s.cfg.Store.List()
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]Snapshot, 0, len(all))
	for _, m := range all {
		out = append(out, s.describe(ctx, m, tags[m.ID]))
	}
	for id, why := range s.cfg.Store.Broken() {
		out = append(out, broken(id, why, tags[id]))
	}
	unpublished, err := s.unpublished(ctx, tags)
	if err != nil {
		return nil, err
	}
	out = append(out, unpublished...)
	slices.SortFunc(out, func(a, b Snapshot) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out, nil
}

// Snapshot returns one snapshot.
func (s *Service) Snapshot(ctx context.Context, ref string) (Snapshot, error) {
	id, _, err := s.resolveSnapshot(ctx, ref)
	if err != nil {
		return Snapshot{}, err
	}
	tags, err := s.tagsByID(ctx)
	if err != nil {
		return Snapshot{}, err
	}
	m, err := s.cfg.Store.Get(id)
	if errors.Is(err, errdefs.ErrNotFound) {
		row, rowErr := s.cfg.Journal.GetSnapshot(ctx, id)
		if rowErr != nil || row.Status == string(SnapshotReady) {
			return Snapshot{}, err // it is being deleted
		}
		return fromSnapshotRow(row, tags[id]), nil
	}
	if err != nil {
		return broken(id, err, tags[id]), nil
	}
	return s.describe(ctx, m, tags[id]), nil
}

// unpublished lists the snapshots that have no files yet, or never got any: live
// captures that are being written, and those that failed.
func (s *Service) unpublished(ctx context.Context, tags map[string][]string) ([]Snapshot, error) {
	rows, err := s.cfg.Journal.ListSnapshots(ctx)
	if err != nil {
		return nil, err
	}
	var out []Snapshot
	for _, row := range rows {
		if row.Status != string(SnapshotWriting) && row.Status != string(SnapshotFailed) {
			continue
		}
		if _, err := s.cfg.Store.Get(row.ID); errors.Is(err, errdefs.ErrNotFound) {
			out = append(out, fromSnapshotRow(row, tags[row.ID]))
		}
	}
	return out, nil
}

func fromSnapshotRow(row metadata.Snapshot, tags []string) Snapshot {
	return Snapshot{ID: row.ID, Tags: tags, Status: SnapshotStatus(row.Status), Reason: row.Reason, CreatedAt: row.CreatedAt}
}

// broken describes a snapshot whose manifest cannot be used.
func broken(id string, why error, tags []string) Snapshot {
	return Snapshot{ID: id, Tags: tags, Status: SnapshotFailed, Reason: why.Error()}
}

func (s *Service) tagsByID(ctx context.Context) (map[string][]string, error) {
	tags, err := s.cfg.Journal.Tags(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string][]string{}
	for _, t := range tags {
		out[t.SnapshotID] = append(out[t.SnapshotID], t.Name)
	}
	return out, nil
}

func (s *Service) describe(ctx context.Context, m snapshot.Manifest, tags []string) Snapshot {
	out := Snapshot{
		ID: m.ID, Tags: tags, ParentID: m.ParentID, ImageID: m.Image.ID, ImageName: m.Image.Name,
		Engine: m.Compat.Engine, Isolation: m.Isolation, Shape: m.Shape, Labels: m.Labels, CreatedAt: m.CreatedAt,
		Recipe:        recipeOf(m.Recipe),
		Pause:         time.Duration(m.PauseMs * float64(time.Millisecond)),
		HoldsSecrets:  m.HoldsSecrets,
		AgentProtocol: m.Agent.Protocol,
	}
	out.Status, out.Reason = s.status(ctx, m)
	if s.checkEngine(m) == nil {
		out.ForkMemory = MemoryCopied
		if s.cfg.Engine.Probe(ctx).SharesMemory {
			out.ForkMemory = MemoryShared
		}
	}
	for _, a := range m.Artifacts {
		switch a.Kind {
		case "memory":
			out.MemoryBytes += a.Bytes
		case "disk":
			out.DiskBytes += a.Bytes
		case "device":
			out.DeviceBytes += a.Bytes
		}
	}
	if chain, err := s.cfg.Store.States(m.ID); err == nil {
		out.Depth = len(chain) - 1
		out.Dir = chain[len(chain)-1].Dir
	} else if out.Status == SnapshotReady {
		out.Status, out.Reason = SnapshotFailed, err.Error()
	}
	for _, h := range s.cfg.Store.Holders(m.ID) {
		if ident.KindOf(h) == ident.Sandbox {
			out.UsedBy = append(out.UsedBy, h)
		}
	}
	out.Sandboxes = len(out.UsedBy)
	out.BranchedFrom, out.Disk, out.ExpiresAt = branchedFrom(m), m.Disk, expiryOf(m)
	return out
}

// DeleteSnapshot deletes a snapshot that no sandbox uses; with d.Cascade also all
// that were made from it.
func (s *Service) DeleteSnapshot(ctx context.Context, ref string, d Delete) error {
	id, _, err := s.resolveSnapshot(ctx, ref)
	if err != nil {
		return err
	}
	if d.Cascade && d.Force {
		return errdefs.New(errdefs.ErrInvalid, "cascade and force exclude each other")
	}
	var ids []string // each before what it was made from
	if d.Cascade {
		ids = s.cfg.Store.Descendants(id)
	}
	ids = append(ids, id)
	// All or nothing: look before the first one goes.
	for _, one := range ids {
		if holders := s.cfg.Store.Holders(one); len(holders) > 0 {
			return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "snapshot %s is in use by %s", one, few(holders)), "end them first with: forkd kill")
		}
	}
	for _, one := range ids {
		if err := s.removeSnapshot(ctx, one); err != nil {
			return err
		}
	}
	return nil
}

func few(names []string) string {
	if len(names) > 3 {
		names = append(slices.Clone(names[:3]), "more")
	}
	return strings.Join(names, ", ")
}

// removeSnapshot deletes one snapshot: files first, so that what the journal still
// lists after a crash is removed at the next start. A parent that only waited for it
// goes, too.
func (s *Service) removeSnapshot(ctx context.Context, id string) error {
	s.forgetPool(id)
	m, _ := s.cfg.Store.Get(id) // one that cannot be read has no parent we know
	if err := s.cfg.Store.Remove(ctx, id); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		if errors.Is(err, errdefs.ErrConflict) {
			err = errdefs.WithHint(err, "delete what was made from it first, or all of it with --cascade")
		}
		return err
	}
	s.logs.remove(id)
	if err := s.cfg.Journal.DeleteSnapshot(ctx, id); err != nil {
		return err
	}
	s.collect(m.ParentID)
	return nil
}

// Tagging says how to give a tag.
type Tagging struct {
	Replace     bool // move it if it is taken
	WithSecrets bool // agrees to name a memory that holds secrets
}

// TagSnapshot gives a snapshot one more tag.
func (s *Service) TagSnapshot(ctx context.Context, ref, tag string, replace bool) error {
	return s.GiveTag(ctx, ref, tag, Tagging{Replace: replace})
}

// GiveTag gives a snapshot one more tag.
func (s *Service) GiveTag(ctx context.Context, ref, tag string, t Tagging) error {
	id, _, err := s.resolveSnapshot(ctx, ref)
	if err != nil {
		return err
	}
	if err := ident.CheckTag(tag); err != nil {
		return err
	}
	m, err := s.cfg.Store.Get(id)
	if err == nil {
		err = checkSecrets("snapshot "+id, m.HoldsSecrets, t.WithSecrets)
	}
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) { // one that is being written can have a tag
		return err
	}
	return s.cfg.Journal.SetTag(ctx, tag, id, tagPolicy(t.Replace))
}

// Untag takes a tag away: ours, or another engine's if we have none. The snapshot stays.
func (s *Service) Untag(ctx context.Context, tag string) error {
	if err := ident.CheckTag(tag); err != nil {
		return err
	}
	found, err := s.cfg.Journal.FindTag(ctx, tag, s.cfg.Engine.Name())
	if err != nil {
		return err
	}
	return s.cfg.Journal.DeleteTag(ctx, found)
}

// recoverSnapshots makes the journal and the store agree: a snapshot that was
// written but not yet proven is removed, and so are rows without files. One that
// cannot be read stays: it may be whole again, and only its owner deletes it.
func (s *Service) recoverSnapshots(ctx context.Context) error {
	rows, err := s.cfg.Journal.ListSnapshots(ctx)
	if err != nil {
		return err
	}
	listed := map[string]bool{}
	for _, row := range rows {
		listed[row.ID] = true
		_, err := s.cfg.Store.Get(row.ID)
		if row.Status == string(SnapshotReady) && !errors.Is(err, errdefs.ErrNotFound) {
			if err != nil {
				s.cfg.Log("snapshot %s cannot be used: %v", row.ID, err)
			}
			continue
		}
		if row.Status == string(SnapshotFailed) {
			continue // its reason stays until somebody deletes it
		}
		if row.Status == string(SnapshotWriting) {
			if err := s.failWriting(ctx, row); err != nil {
				return err
			}
			continue
		}
		s.cfg.Log("removing snapshot %s, left %s", row.ID, row.Status)
		if err := s.removeSnapshot(ctx, row.ID); err != nil {
			return err
		}
	}
	return s.recordFound(ctx, listed)
}

// failWriting marks a live capture that the daemon did not finish: whoever asked for
// it and did not wait finds it with the reason.
func (s *Service) failWriting(ctx context.Context, row metadata.Snapshot) error {
	s.cfg.Log("snapshot %s was not finished", row.ID)
	s.cfg.Engine.Forget(row.ID)
	if err := s.cfg.Store.Remove(ctx, row.ID); err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return err
	}
	row.Status, row.Reason = string(SnapshotFailed), "the daemon ended while it was being written"
	return s.cfg.Journal.PutSnapshot(ctx, row)
}

// recordFound makes rows for snapshots that the journal does not list.
func (s *Service) recordFound(ctx context.Context, listed map[string]bool) error {
	// Copied here by hand, or from a lost journal: its files say what it is.
	var found []metadata.Snapshot
	for id := range s.cfg.Store.Broken() {
		found = append(found, metadata.Snapshot{ID: id, CreatedAt: time.Now()})
	}
	for _, m := range s.cfg.Store.List() {
		found = append(found, metadata.Snapshot{ID: m.ID, Engine: m.Compat.Engine, CreatedAt: m.CreatedAt})
	}
	for _, row := range found {
		if listed[row.ID] {
			continue
		}
		row.Status = string(SnapshotReady)
		if err := s.cfg.Journal.PutSnapshot(ctx, row); err != nil {
			return err
		}
	}
	return nil
}
