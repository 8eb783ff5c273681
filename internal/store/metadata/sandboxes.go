package metadata

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
)

// Sandbox is the journal's row of a sandbox.
type Sandbox struct {
	ID             string
	Name           string // unique among the living, or ""
	State          string
	Reason         string
	SnapshotID     string
	SnapshotTag    string
	Engine         string
	Isolation      engine.Isolation
	Shape          engine.Shape
	Labels         map[string]string
	CreatedAt      time.Time
	EndedAt        time.Time // zero while it lives
	MemoryLimitMiB int
	// CPULimitPercent is of one processor; 0 means no limit, as with PIDsLimit.
	CPULimitPercent int
	// MachineID names its machine if that is not the first: a rollback makes another.
	// RestoredID is the checkpoint that it was restored from then.
	MachineID, RestoredID string
	PIDsLimit             int
	BranchCount           int
	Batch                 string // id of the fork call it came from
	Session               string // of the private daemon it ends with, or ""
	HoldsSecrets          bool
	// VerdictOwed is set while the guest is frozen by a capture: what it has to be
	// told when it runs again ("source" or "fork"). "" means it is not frozen.
	VerdictOwed string
	Receipt     json.RawMessage // of the fork contract; nil until there is one
	Timing      json.RawMessage
	Schedule    json.RawMessage // of its automatic checkpoints; nil if there are none
}

// Life selects sandboxes by whether they have ended.
type Life int

// What a SandboxFilter selects by Life.
const (
	Any Life = iota
	Living
	Ended
)

// SandboxFilter selects sandboxes; a zero field selects all.
type SandboxFilter struct {
	Life       Life
	IDPrefix   string
	Name       string
	SnapshotID string
	Batch      string
	Session    string
	States     []string
	Labels     map[string]string // all of them must match
}

const sandboxColumns = `id, name, state, reason, snapshot_id, snapshot_tag, engine, isolation, shape, labels,
	created_at, ended_at, memory_limit_mib, branch_count, batch, session, holds_secrets, verdict_owed, receipt, timing, cpu_limit_percent, pids_limit, machine_id, restored_id, schedule`

const insertSandbox = `INSERT INTO sandboxes (` + sandboxColumns + `)
	VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`

const updateSandbox = `UPDATE sandboxes SET (` + sandboxColumns + `)
	= (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25) WHERE id = ?1`

func (s Sandbox) values() ([]any, error) {
	shape, err := json.Marshal(s.Shape)
	if err != nil {
		return nil, err
	}
	labels, err := json.Marshal(s.Labels)
	if err != nil {
		return nil, err
	}
	return []any{
		s.ID, s.Name, s.State, s.Reason, s.SnapshotID, s.SnapshotTag, s.Engine, string(s.Isolation), string(shape), string(labels),
		nanos(s.CreatedAt), nanos(s.EndedAt), s.MemoryLimitMiB, s.BranchCount, s.Batch, s.Session, s.HoldsSecrets, s.VerdictOwed,
		string(s.Receipt), string(s.Timing), s.CPULimitPercent, s.PIDsLimit, s.MachineID, s.RestoredID, string(s.Schedule),
	}, nil
}

func scanSandbox(rows *sql.Rows) (Sandbox, error) {
	var s Sandbox
	var shape, labels, receipt, timing, schedule []byte
	var created, ended int64
	err := rows.Scan(&s.ID, &s.Name, &s.State, &s.Reason, &s.SnapshotID, &s.SnapshotTag, &s.Engine, &s.Isolation, &shape, &labels,
		&created, &ended, &s.MemoryLimitMiB, &s.BranchCount, &s.Batch, &s.Session, &s.HoldsSecrets, &s.VerdictOwed, &receipt, &timing, &s.CPULimitPercent, &s.PIDsLimit, &s.MachineID, &s.RestoredID, &schedule)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(shape, &s.Shape); err != nil {
		return s, errdefs.New(errdefs.ErrCorrupt, "shape of sandbox %s: %w", s.ID, err)
	}
	if err := json.Unmarshal(labels, &s.Labels); err != nil {
		return s, errdefs.New(errdefs.ErrCorrupt, "labels of sandbox %s: %w", s.ID, err)
	}
	s.CreatedAt, s.EndedAt = fromNanos(created), fromNanos(ended)
	if len(receipt) > 0 {
		s.Receipt = receipt
	}
	if len(timing) > 0 {
		s.Timing = timing
	}
	if len(schedule) > 0 {
		s.Schedule = schedule
	}
	return s, nil
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func fromNanos(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

// InsertSandboxes adds all sandboxes or, if one fails, none: ErrConflict if an id
// exists or a name is taken.
func (d *DB) InsertSandboxes(ctx context.Context, all []Sandbox) error {
	return d.writeSandboxes(ctx, "record", insertSandbox, all)
}

// UpdateSandbox overwrites the row of a sandbox: ErrNotFound if there is none.
func (d *DB) UpdateSandbox(ctx context.Context, s Sandbox) error {
	return d.UpdateSandboxes(ctx, []Sandbox{s})
}

// UpdateSandboxes overwrites the rows of all sandboxes or, if one fails, of none.
func (d *DB) UpdateSandboxes(ctx context.Context, all []Sandbox) error {
	return d.writeSandboxes(ctx, "update", updateSandbox, all)
}

func (d *DB) writeSandboxes(ctx context.Context, verb, statement string, all []Sandbox) error {
	rows := make([][]any, len(all))
	for i, s := range all {
		var err error
		if rows[i], err = s.values(); err != nil {
			return errdefs.New(errdefs.ErrInvalid, "%s sandbox %s: %w", verb, s.ID, err)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return d.writer.submit(ctx, relaxed, func(t *tx) error {
		for i, row := range rows {
			n, err := t.exec(statement, row...)
			switch {
			case isDuplicate(err):
				return nameConflict(t, verb, all[i])
			case err != nil:
				return fmt.Errorf("%s sandbox %s: %w", verb, all[i].ID, classify(err))
			case n == 0:
				return errdefs.New(errdefs.ErrNotFound, "%s sandbox %s: it is not in the journal", verb, all[i].ID)
			}
		}
		return nil
	})
}

// nameConflict says whether the id or the name of s is taken, and by which sandbox.
func nameConflict(t *tx, verb string, s Sandbox) error {
	holders, err := t.strings("SELECT id FROM sandboxes WHERE name = ? AND name <> '' AND ended_at = 0 AND id <> ?", s.Name, s.ID)
	if err != nil {
		return fmt.Errorf("%s sandbox %s: %w", verb, s.ID, classify(err))
	}
	if len(holders) == 0 {
		return errdefs.New(errdefs.ErrConflict, "%s sandbox %s: the id exists", verb, s.ID)
	}
	return errdefs.WithHint(
		errdefs.New(errdefs.ErrConflict, "%s sandbox %s: the name %q is taken by %s", verb, s.ID, s.Name, holders[0]),
		"choose another name, or end %s first", holders[0])
}

// GetSandbox returns the row of a sandbox, ended or not.
func (d *DB) GetSandbox(ctx context.Context, id string) (Sandbox, error) {
	found, err := d.listSandboxes(ctx, SandboxFilter{}, "id = ?", id)
	if err != nil {
		return Sandbox{}, fmt.Errorf("read sandbox %s: %w", id, err)
	}
	if len(found) == 0 {
		return Sandbox{}, errdefs.New(errdefs.ErrNotFound, "sandbox %s does not exist", id)
	}
	return found[0], nil
}

// ListSandboxes returns what matches, oldest first.
func (d *DB) ListSandboxes(ctx context.Context, f SandboxFilter) ([]Sandbox, error) {
	var where []string
	var args []any
	add := func(cond string, values ...any) {
		where, args = append(where, cond), append(args, values...)
	}
	for cond, value := range map[string]string{
		"name = ?": f.Name, "snapshot_id = ?": f.SnapshotID, "batch = ?": f.Batch, "session = ?": f.Session,
	} {
		if value != "" {
			add(cond, value)
		}
	}
	if f.IDPrefix != "" {
		// Not LIKE: the prefix comes from a caller and may hold wildcards.
		add("substr(id, 1, length(?)) = ?", f.IDPrefix, f.IDPrefix)
	}
	switch f.Life {
	case Living:
		add("ended_at = 0")
	case Ended:
		add("ended_at <> 0")
	}
	if len(f.States) > 0 {
		states := make([]any, len(f.States))
		for i, s := range f.States {
			states[i] = s
		}
		add("state IN (?"+strings.Repeat(", ?", len(states)-1)+")", states...)
	}
	if len(where) == 0 {
		add("TRUE")
	}
	found, err := d.listSandboxes(ctx, f, strings.Join(where, " AND "), args...)
	if err != nil {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	return found, nil
}

func (d *DB) listSandboxes(ctx context.Context, f SandboxFilter, where string, args ...any) ([]Sandbox, error) {
	var out []Sandbox
	err := d.query(ctx, func(rows *sql.Rows) error {
		s, err := scanSandbox(rows)
		if err != nil {
			return err
		}
		for k, v := range f.Labels {
			if have, ok := s.Labels[k]; !ok || have != v {
				return nil
			}
		}
		out = append(out, s)
		return nil
	}, "SELECT "+sandboxColumns+" FROM sandboxes WHERE "+where+" ORDER BY created_at, id", args...)
	return out, err
}

// DeleteSandboxes forgets sandboxes; ids that do not exist are no error.
func (d *DB) DeleteSandboxes(ctx context.Context, ids ...string) error {
	return d.writer.submit(ctx, relaxed, func(t *tx) error {
		for _, id := range ids {
			if _, err := t.exec("DELETE FROM sandboxes WHERE id = ?", id); err != nil {
				return fmt.Errorf("forget sandbox %s: %w", id, classify(err))
			}
		}
		return nil
	})
}

// PruneEnded forgets the sandboxes that ended before a time and returns their ids.
func (d *DB) PruneEnded(ctx context.Context, before time.Time) ([]string, error) {
	var ids []string
	err := d.writer.submit(ctx, relaxed, func(t *tx) error {
		var err error
		ids, err = t.strings("DELETE FROM sandboxes WHERE ended_at <> 0 AND ended_at < ? RETURNING id", nanos(before))
		return classify(err)
	})
	if err != nil {
		return nil, fmt.Errorf("forget ended sandboxes: %w", err)
	}
	return ids, nil
}
