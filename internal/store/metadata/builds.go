package metadata

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// Build is a long operation that makes an image or a snapshot.
type Build struct {
	ID        string
	Kind      string // "image" or "snapshot"
	Target    string // name or tag it makes
	State     string
	Step      string // what it does now
	Error     string
	StartedAt time.Time
	EndedAt   time.Time // zero while it runs
}

// PutBuild inserts or overwrites the row of a build.
func (d *DB) PutBuild(ctx context.Context, b Build) error {
	return d.writer.submit(ctx, relaxed, func(t *tx) error {
		_, err := t.exec("INSERT OR REPLACE INTO builds (id, kind, target, state, step, error, started_at, ended_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
			b.ID, b.Kind, b.Target, b.State, b.Step, b.Error, nanos(b.StartedAt), nanos(b.EndedAt))
		if err != nil {
			return fmt.Errorf("record build %s: %w", b.ID, classify(err))
		}
		return nil
	})
}

// Builds returns all builds, oldest first.
func (d *DB) Builds(ctx context.Context) ([]Build, error) {
	var out []Build
	err := d.query(ctx, func(rows *sql.Rows) error {
		var b Build
		var started, ended int64
		err := rows.Scan(&b.ID, &b.Kind, &b.Target, &b.State, &b.Step, &b.Error, &started, &ended)
		b.StartedAt, b.EndedAt = fromNanos(started), fromNanos(ended)
		out = append(out, b)
		return err
	}, "SELECT id, kind, target, state, step, error, started_at, ended_at FROM builds ORDER BY started_at, id")
	if err != nil {
		return nil, fmt.Errorf("list builds: %w", err)
	}
	return out, nil
}

// DeleteBuild forgets a build: ErrNotFound if there is none.
func (d *DB) DeleteBuild(ctx context.Context, id string) error {
	return d.writer.submit(ctx, relaxed, func(t *tx) error {
		n, err := t.exec("DELETE FROM builds WHERE id = ?", id)
		if err != nil {
			return fmt.Errorf("forget build %s: %w", id, classify(err))
		}
		if n == 0 {
			return errdefs.New(errdefs.ErrNotFound, "build %s does not exist", id)
		}
		return nil
	})
}
