-- version 5
CREATE TABLE builds (
		id         TEXT PRIMARY KEY,
		kind       TEXT NOT NULL,
		target     TEXT NOT NULL,
		state      TEXT NOT NULL,
		step       TEXT NOT NULL,
		error      TEXT NOT NULL,
		started_at INTEGER NOT NULL,
		ended_at   INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
CREATE TABLE leases (
		snapshot_id TEXT NOT NULL REFERENCES snapshots(id),
		holder      TEXT NOT NULL,
		PRIMARY KEY (snapshot_id, holder)
	) STRICT, WITHOUT ROWID;
CREATE INDEX leases_holder ON leases(holder);
CREATE TABLE meta (
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
	, cpu_limit_percent INTEGER NOT NULL DEFAULT 0, pids_limit INTEGER NOT NULL DEFAULT 0, machine_id TEXT NOT NULL DEFAULT '', restored_id TEXT NOT NULL DEFAULT '', schedule TEXT NOT NULL DEFAULT '') STRICT, WITHOUT ROWID;
CREATE INDEX sandboxes_ended ON sandboxes(ended_at);
CREATE UNIQUE INDEX sandboxes_living_name ON sandboxes(name) WHERE name <> '' AND ended_at = 0;
CREATE INDEX sandboxes_snapshot ON sandboxes(snapshot_id);
CREATE TABLE snapshots (
		id         TEXT PRIMARY KEY,
		status     TEXT NOT NULL,
		reason     TEXT NOT NULL,
		dir        TEXT NOT NULL,
		created_at INTEGER NOT NULL
	, engine TEXT NOT NULL DEFAULT 'qemu') STRICT, WITHOUT ROWID;
CREATE TABLE "tags" (
		tag         TEXT NOT NULL,
		engine      TEXT NOT NULL,
		snapshot_id TEXT NOT NULL REFERENCES snapshots(id) ON DELETE CASCADE,
		PRIMARY KEY (tag, engine)
	) STRICT, WITHOUT ROWID;
CREATE INDEX tags_snapshot ON tags(snapshot_id);
CREATE TABLE warm_pools (
		snapshot_id TEXT PRIMARY KEY REFERENCES snapshots(id) ON DELETE CASCADE,
		want        INTEGER NOT NULL
	) STRICT, WITHOUT ROWID;
