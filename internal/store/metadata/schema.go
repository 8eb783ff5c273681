package metadata

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"strings"

	"forkd.dev/forkd/internal/errdefs"
)

// applicationID marks the database file as ours ("FRKD").
const applicationID = 0x46524b44

// migrations bring the schema from version i to i+1. Released entries never
// change; a new one is appended. Times are nanoseconds since 1970, 0 for none.
var migrations = []string{
	`CREATE TABLE meta (
		key   TEXT PRIMARY KEY,
		value TEXT NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE TABLE sandboxes (
		id               TEXT PRIMARY KEY,
		name             TEXT NOT NULL,
		state            TEXT NOT NULL,
		reason           TEXT NOT NULL,
		snapshot_id      TEXT NOT NULL,
		snapshot_tag     TEXT NOT NULL,
		engine           TEXT NOT NULL,
		isolation        TEXT NOT NULL,
		shape            TEXT NOT NULL,
		labels           TEXT NOT NULL,
		created_at       INTEGER NOT NULL,
		ended_at         INTEGER NOT NULL,
		memory_limit_mib INTEGER NOT NULL,
		branch_count     INTEGER NOT NULL,
		batch            TEXT NOT NULL,
		session          TEXT NOT NULL,
		holds_secrets    INTEGER NOT NULL,
		verdict_owed     TEXT NOT NULL,
		receipt          TEXT NOT NULL,
		timing           TEXT NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE UNIQUE INDEX sandboxes_living_name ON sandboxes(name) WHERE name <> '' AND ended_at = 0;
	CREATE INDEX sandboxes_snapshot ON sandboxes(snapshot_id);
	CREATE INDEX sandboxes_ended ON sandboxes(ended_at);
	CREATE TABLE snapshots (
		id         TEXT PRIMARY KEY,
		status     TEXT NOT NULL,
		reason     TEXT NOT NULL,
		dir        TEXT NOT NULL,
		created_at INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	CREATE TABLE tags (
		tag         TEXT PRIMARY KEY,
		snapshot_id TEXT NOT NULL REFERENCES snapshots(id) ON DELETE CASCADE
	) STRICT, WITHOUT ROWID;
	CREATE INDEX tags_snapshot ON tags(snapshot_id);
	CREATE TABLE leases (
		snapshot_id TEXT NOT NULL REFERENCES snapshots(id),
		holder      TEXT NOT NULL,
		PRIMARY KEY (snapshot_id, holder)
	) STRICT, WITHOUT ROWID;
	CREATE INDEX leases_holder ON leases(holder);
	CREATE TABLE builds (
		id         TEXT PRIMARY KEY,
		kind       TEXT NOT NULL,
		target     TEXT NOT NULL,
		state      TEXT NOT NULL,
		step       TEXT NOT NULL,
		error      TEXT NOT NULL,
		started_at INTEGER NOT NULL,
		ended_at   INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;`,
	`CREATE TABLE warm_pools (
		snapshot_id TEXT PRIMARY KEY REFERENCES snapshots(id) ON DELETE CASCADE,
		want        INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
	ALTER TABLE sandboxes ADD COLUMN cpu_limit_percent INTEGER NOT NULL DEFAULT 0;
	ALTER TABLE sandboxes ADD COLUMN pids_limit INTEGER NOT NULL DEFAULT 0;`,
	`ALTER TABLE sandboxes ADD COLUMN machine_id TEXT NOT NULL DEFAULT '';
	ALTER TABLE sandboxes ADD COLUMN restored_id TEXT NOT NULL DEFAULT '';`,
	`ALTER TABLE sandboxes ADD COLUMN schedule TEXT NOT NULL DEFAULT '';`,
	// Until here there was one engine.
	`ALTER TABLE snapshots ADD COLUMN engine TEXT NOT NULL DEFAULT 'qemu';
	CREATE TABLE engine_tags (
		tag         TEXT NOT NULL,
		engine      TEXT NOT NULL,
		snapshot_id TEXT NOT NULL REFERENCES snapshots(id) ON DELETE CASCADE,
		PRIMARY KEY (tag, engine)
	) STRICT, WITHOUT ROWID;
	INSERT INTO engine_tags SELECT tag, 'qemu', snapshot_id FROM tags;
	DROP TABLE tags;
	ALTER TABLE engine_tags RENAME TO tags;
	CREATE INDEX tags_snapshot ON tags(snapshot_id);`,
}

// migrate brings the database to the newest schema in one transaction.
func migrate(ctx context.Context, conn *sql.Conn) error {
	var have, app int
	if err := conn.QueryRowContext(ctx, "PRAGMA user_version").Scan(&have); err != nil {
		return classify(err)
	}
	if err := conn.QueryRowContext(ctx, "PRAGMA application_id").Scan(&app); err != nil {
		return classify(err)
	}
	switch {
	case app != applicationID && (app != 0 || have != 0):
		return errdefs.New(errdefs.ErrIncompatible, "it is a database of another program (application id %#x)", app)
	case have > len(migrations):
		return errdefs.WithHint(
			errdefs.New(errdefs.ErrIncompatible, "its schema has version %d, this forkd knows up to %d", have, len(migrations)),
			"run the newer forkd that wrote it, or use another --data-dir")
	case have == len(migrations):
		return nil
	}
	var script strings.Builder
	script.WriteString("BEGIN IMMEDIATE;\n")
	for _, m := range migrations[have:] {
		script.WriteString(m)
	}
	// Pragmas take no parameters; both numbers are constants of this file.
	fmt.Fprintf(&script, "\nINSERT OR IGNORE INTO meta VALUES ('installation', '%s');", strings.ToLower(rand.Text()[:20]))
	fmt.Fprintf(&script, "\nPRAGMA application_id = %d; PRAGMA user_version = %d; COMMIT;", applicationID, len(migrations))
	if _, err := conn.ExecContext(ctx, script.String()); err != nil {
		// The caller closes the connection, which rolls back.
		return fmt.Errorf("migrate from version %d to %d: %w", have, len(migrations), classify(err))
	}
	return nil
}
