package metadata

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"database/sql"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

func TestWarmPools(t *testing.T) {
	dir := t.TempDir()
	d := openIn(t, dir)
	id := ident.New(ident.Snapshot)
	wantClass(t, d.SetWarmPool(t.Context(), id, 3), errdefs.ErrNotFound)
	if err := d.PutSnapshot(t.Context(), Snapshot{ID: id, Status: "ready", CreatedAt: time.Unix(1, 0)}); err != nil {
		t.Fatal(err)
	}
	check := func(want map[string]int) {
		t.Helper()
		if got, err := d.WarmPools(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("pools are %v, %v, want %v", got, err, want)
		}
	}
	set := func(n int) {
		t.Helper()
		if err := d.SetWarmPool(t.Context(), id, n); err != nil {
			t.Fatal(err)
		}
	}
	set(3)
	set(5)
	check(map[string]int{id: 5})
	set(0)
	check(map[string]int{})
	set(2)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = openIn(t, dir)
	check(map[string]int{id: 2})
	if err := d.DeleteSnapshot(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	check(map[string]int{})
}

// TestMigratesOldSchemas opens journals of every released schema and finds their
// sandboxes unchanged.
func TestMigratesOldSchemas(t *testing.T) {
	for version := 1; version < len(migrations); version++ {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			dir := t.TempDir()
			script, err := os.ReadFile(filepath.Join("testdata", fmt.Sprintf("schema_v%d.sql", version)))
			if err != nil {
				t.Fatal(err)
			}
			db, err := sql.Open("sqlite", filepath.Join(dir, fileName))
			if err != nil {
				t.Fatal(err)
			}
			row := `INSERT INTO sandboxes (id, name, state, reason, snapshot_id, snapshot_tag, engine, isolation, shape, labels, created_at, ended_at,
				memory_limit_mib, branch_count, batch, session, holds_secrets, verdict_owed, receipt, timing)
				VALUES ('sb1', 'old', 'running', '', 'sn1', '', 'qemu', '', '{}', '{}', 1, 0, 7, 0, '', '', 0, '', '', '');
				INSERT INTO snapshots (id, status, reason, dir, created_at) VALUES ('sn1', 'ready', '', '', 1);
				INSERT INTO tags VALUES ('old-tag', 'sn1');
				INSERT INTO meta VALUES ('installation', 'abc');`
			pragmas := fmt.Sprintf("PRAGMA application_id = %d; PRAGMA user_version = %d;", applicationID, version)
			if _, err := db.ExecContext(t.Context(), string(script)+row+pragmas); err != nil {
				t.Fatal(err)
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			d := openIn(t, dir)
			got, err := d.GetSandbox(t.Context(), "sb1")
			if err != nil || got.Name != "old" || got.MemoryLimitMiB != 7 || got.CPULimitPercent != 0 || d.Installation() != "abc" {
				t.Errorf("after the migration the sandbox is %+v, %v, of installation %s", got, err, d.Installation())
			}
			tags, err := d.Tags(t.Context())
			if err != nil || !reflect.DeepEqual(tags, []Tag{{"old-tag", "qemu", "sn1"}}) {
				t.Errorf("after the migration the tags are %+v, %v", tags, err)
			}
		})
	}
}
