package metadata

import (
	"context"
	"database/sql"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
)

// SetWarmPool records how many warm machines of a snapshot are wanted, fsynced;
// 0 forgets it. It is forgotten with the snapshot, too. ErrNotFound: there is no
// such snapshot.
func (d *DB) SetWarmPool(ctx context.Context, snapshotID string, want int) error {
	return d.writer.submit(ctx, durable, func(t *tx) error {
		var err error
		if want == 0 {
			_, err = t.exec("DELETE FROM warm_pools WHERE snapshot_id = ?", snapshotID)
		} else {
			_, err = t.exec("INSERT INTO warm_pools (snapshot_id, want) VALUES (?, ?) ON CONFLICT(snapshot_id) DO UPDATE SET want = excluded.want", snapshotID, want)
		}
		if isMissingReference(err) {
			return errdefs.New(errdefs.ErrNotFound, "set warm pool: snapshot %s does not exist", snapshotID)
		}
		if err != nil {
			return fmt.Errorf("set warm pool of %s: %w", snapshotID, classify(err))
		}
		return nil
	})
}

// WarmPools returns how many warm machines are wanted, by snapshot id.
func (d *DB) WarmPools(ctx context.Context) (map[string]int, error) {
	out := map[string]int{}
	err := d.query(ctx, func(rows *sql.Rows) error {
		var id string
		var want int
		err := rows.Scan(&id, &want)
		out[id] = want
		return err
	}, "SELECT snapshot_id, want FROM warm_pools")
	if err != nil {
		return nil, fmt.Errorf("list warm pools: %w", err)
	}
	return out, nil
}
