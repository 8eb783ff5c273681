package metadata

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// Snapshot is the journal's row of a snapshot. What it is made of stands in its
// manifest; here stands how far it got.
type Snapshot struct {
	ID        string
	Status    string
	Reason    string // why failed or stale
	Engine    string // whose snapshot it is; "" in an update keeps what is recorded
	Dir       string // where a capture in progress writes, or ""
	CreatedAt time.Time
}

// StatusFailed is the status of a snapshot whose tag is free for others.
const StatusFailed = "failed"

// Tag is a name of a snapshot. Each engine has tags of its own: the same word may
// name one snapshot of each.
type Tag struct {
	Name       string
	Engine     string // of the snapshot
	SnapshotID string
}

// TagPolicy says what happens to a tag that points to another snapshot of its engine.
type TagPolicy int

// The tag policies.
const (
	KeepTag TagPolicy = iota // ErrConflict, unless that one has failed
	MoveTag                  // it moves, atomically
)

const upsertSnapshot = `INSERT INTO snapshots (id, status, reason, dir, created_at, engine) VALUES (?, ?, ?, ?, ?, ?)
	ON CONFLICT(id) DO UPDATE SET status = excluded.status, reason = excluded.reason, dir = excluded.dir, created_at = excluded.created_at,
	engine = CASE excluded.engine WHEN '' THEN engine ELSE excluded.engine END`

func (s Snapshot) put(t *tx) error {
	_, err := t.exec(upsertSnapshot, s.ID, s.Status, s.Reason, s.Dir, nanos(s.CreatedAt), s.Engine)
	return classify(err)
}

// PutSnapshot inserts or overwrites the row of a snapshot.
func (d *DB) PutSnapshot(ctx context.Context, s Snapshot) error {
	err := d.writer.submit(ctx, relaxed, s.put)
	if err != nil {
		return fmt.Errorf("record snapshot %s: %w", s.ID, err)
	}
	return nil
}

// PublishSnapshot writes the row of a finished snapshot and gives it tag, if not
// "", in one fsynced transaction. With KeepTag and a taken tag nothing changes.
func (d *DB) PublishSnapshot(ctx context.Context, s Snapshot, tag string, policy TagPolicy) error {
	if err := checkTag(tag); err != nil {
		return err
	}
	err := d.writer.submit(ctx, durable, func(t *tx) error {
		if err := s.put(t); err != nil || tag == "" {
			return err
		}
		return setTag(t, tag, s.ID, policy)
	})
	if err != nil {
		return fmt.Errorf("publish snapshot %s: %w", s.ID, err)
	}
	return nil
}

// GetSnapshot returns the row of a snapshot.
func (d *DB) GetSnapshot(ctx context.Context, id string) (Snapshot, error) {
	found, err := d.snapshots(ctx, "WHERE id = ?", id)
	if err != nil {
		return Snapshot{}, fmt.Errorf("read snapshot %s: %w", id, err)
	}
	if len(found) == 0 {
		return Snapshot{}, errdefs.New(errdefs.ErrNotFound, "snapshot %s does not exist", id)
	}
	return found[0], nil
}

// ListSnapshots returns all snapshots, oldest first.
func (d *DB) ListSnapshots(ctx context.Context) ([]Snapshot, error) {
	found, err := d.snapshots(ctx, "")
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return found, nil
}

func (d *DB) snapshots(ctx context.Context, where string, args ...any) ([]Snapshot, error) {
	var out []Snapshot
	err := d.query(ctx, func(rows *sql.Rows) error {
		var s Snapshot
		var created int64
		err := rows.Scan(&s.ID, &s.Status, &s.Reason, &s.Dir, &created, &s.Engine)
		s.CreatedAt = fromNanos(created)
		out = append(out, s)
		return err
	}, "SELECT id, status, reason, dir, created_at, engine FROM snapshots "+where+" ORDER BY created_at, id", args...)
	return out, err
}

// DeleteSnapshot forgets a snapshot and its tags, fsynced. It is refused with
// ErrConflict while leases exist; a snapshot that does not exist is ErrNotFound.
func (d *DB) DeleteSnapshot(ctx context.Context, id string) error {
	return d.writer.submit(ctx, durable, func(t *tx) error {
		n, err := t.exec("DELETE FROM snapshots WHERE id = ?", id)
		switch {
		case isMissingReference(err):
			holders, err := t.strings("SELECT holder FROM leases WHERE snapshot_id = ? ORDER BY holder", id)
			if err != nil {
				return fmt.Errorf("delete snapshot %s: %w", id, classify(err))
			}
			return errdefs.New(errdefs.ErrConflict, "delete snapshot %s: it is in use by %d, one is %s", id, len(holders), holders[0])
		case err != nil:
			return fmt.Errorf("delete snapshot %s: %w", id, classify(err))
		case n == 0:
			return errdefs.New(errdefs.ErrNotFound, "snapshot %s does not exist", id)
		}
		return nil
	})
}

func checkTag(tag string) error {
	if tag == "" {
		return nil
	}
	return ident.CheckTag(tag)
}

// SetTag points tag to a snapshot, fsynced. Setting it again is no error.
func (d *DB) SetTag(ctx context.Context, tag, snapshotID string, policy TagPolicy) error {
	if err := ident.CheckTag(tag); err != nil {
		return err
	}
	return d.writer.submit(ctx, durable, func(t *tx) error { return setTag(t, tag, snapshotID, policy) })
}

func setTag(t *tx, tag, id string, policy TagPolicy) error {
	engines, err := t.strings("SELECT engine FROM snapshots WHERE id = ?", id)
	if err != nil {
		return fmt.Errorf("set tag %s: %w", tag, classify(err))
	}
	if len(engines) == 0 {
		return errdefs.New(errdefs.ErrNotFound, "set tag %s: snapshot %s does not exist", tag, id)
	}
	// What has failed keeps its tag for those who look for it, but from nobody else.
	have, err := t.strings("SELECT t.snapshot_id FROM tags t JOIN snapshots s ON s.id = t.snapshot_id WHERE t.tag = ? AND t.engine = ? AND s.status <> ?",
		tag, engines[0], StatusFailed)
	if err != nil {
		return fmt.Errorf("set tag %s: %w", tag, classify(err))
	}
	if len(have) > 0 && have[0] != id && policy == KeepTag {
		return errdefs.WithHint(errdefs.New(errdefs.ErrConflict, "set tag %s: it belongs to snapshot %s", tag, have[0]),
			"use --replace to move it, or another tag")
	}
	_, err = t.exec("INSERT INTO tags (tag, engine, snapshot_id) VALUES (?, ?, ?) ON CONFLICT(tag, engine) DO UPDATE SET snapshot_id = excluded.snapshot_id",
		tag, engines[0], id)
	if err != nil {
		return fmt.Errorf("set tag %s: %w", tag, classify(err))
	}
	return nil
}

// DeleteTag removes a tag, fsynced: ErrNotFound if it does not name that snapshot.
func (d *DB) DeleteTag(ctx context.Context, t Tag) error {
	return d.writer.submit(ctx, durable, func(x *tx) error {
		n, err := x.exec("DELETE FROM tags WHERE tag = ? AND engine = ? AND snapshot_id = ?", t.Name, t.Engine, t.SnapshotID)
		if err != nil {
			return fmt.Errorf("delete tag %.80q: %w", t.Name, classify(err))
		}
		if n == 0 {
			return errdefs.New(errdefs.ErrNotFound, "tag %.80q does not exist", t.Name)
		}
		return nil
	})
}

// Tags returns the tags of all engines, ordered by name and engine.
func (d *DB) Tags(ctx context.Context) ([]Tag, error) {
	out, err := d.tags(ctx, "")
	if err != nil {
		return nil, fmt.Errorf("list tags: %w", err)
	}
	return out, nil
}

// FindTag returns what a tag means to an engine: its own, else that of another one,
// else ErrNotFound.
func (d *DB) FindTag(ctx context.Context, name, engine string) (Tag, error) {
	found, err := d.tags(ctx, "WHERE tag = ?", name)
	if err != nil {
		return Tag{}, fmt.Errorf("resolve tag %.80q: %w", name, err)
	}
	for _, t := range found {
		if t.Engine == engine {
			return t, nil
		}
	}
	if len(found) == 0 {
		return Tag{}, errdefs.New(errdefs.ErrNotFound, "tag %.80q does not exist", name)
	}
	return found[0], nil
}

func (d *DB) tags(ctx context.Context, where string, args ...any) ([]Tag, error) {
	var out []Tag
	err := d.query(ctx, func(rows *sql.Rows) error {
		var t Tag
		err := rows.Scan(&t.Name, &t.Engine, &t.SnapshotID)
		out = append(out, t)
		return err
	}, "SELECT tag, engine, snapshot_id FROM tags "+where+" ORDER BY tag, engine", args...)
	return out, err
}

// AddLease records that holder needs a snapshot. Adding it again is no error.
func (d *DB) AddLease(ctx context.Context, snapshotID, holder string) error {
	return d.writer.submit(ctx, relaxed, func(t *tx) error {
		_, err := t.exec("INSERT INTO leases (snapshot_id, holder) VALUES (?, ?) ON CONFLICT DO NOTHING", snapshotID, holder)
		if isMissingReference(err) {
			return errdefs.New(errdefs.ErrNotFound, "lease snapshot %s: it does not exist", snapshotID)
		}
		if err != nil {
			return fmt.Errorf("lease snapshot %s: %w", snapshotID, classify(err))
		}
		return nil
	})
}

// DropLease removes a lease; one that does not exist is no error.
func (d *DB) DropLease(ctx context.Context, snapshotID, holder string) error {
	return d.writer.submit(ctx, relaxed, func(t *tx) error {
		if _, err := t.exec("DELETE FROM leases WHERE snapshot_id = ? AND holder = ?", snapshotID, holder); err != nil {
			return fmt.Errorf("release snapshot %s: %w", snapshotID, classify(err))
		}
		return nil
	})
}

// Lease says that Holder needs a snapshot.
type Lease struct {
	SnapshotID string
	Holder     string
}

// Leases returns all leases, ordered by snapshot and holder.
func (d *DB) Leases(ctx context.Context) ([]Lease, error) {
	var out []Lease
	err := d.query(ctx, func(rows *sql.Rows) error {
		var l Lease
		err := rows.Scan(&l.SnapshotID, &l.Holder)
		out = append(out, l)
		return err
	}, "SELECT snapshot_id, holder FROM leases ORDER BY snapshot_id, holder")
	if err != nil {
		return nil, fmt.Errorf("list leases: %w", err)
	}
	return out, nil
}
