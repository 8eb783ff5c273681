package metadata

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
)

// durability says what a write must survive when its call returns.
type durability bool

const (
	relaxed durability = false // a crash of the process
	durable durability = true  // loss of power
)

// maxBatch bounds the calls joined in one transaction, so that none waits long.
const maxBatch = 256

// writer owns the only connection that writes and the goroutine that uses it.
type writer struct {
	ctx   context.Context // never canceled: interrupting SQLite would undo a whole batch
	db    *sql.DB
	conn  *sql.Conn
	calls chan *call // unbuffered: a call that was received is always answered
	quit  chan struct{}
	done  chan struct{}
	stmts map[string]*sql.Stmt // only used by the goroutine
	// failpoint is Config.Failpoint, or nil.
	failpoint func(Step) error
}

type call struct {
	ctx  context.Context
	do   func(*tx) error
	kind durability
	err  error
	done chan struct{}
}

// openWriter connects, checks and migrates the database and starts the goroutine.
func openWriter(ctx context.Context, dsn string) (*writer, error) {
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, classify(err)
	}
	db.SetMaxOpenConns(1)
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, errors.Join(classify(err), db.Close())
	}
	w := &writer{
		ctx:   context.WithoutCancel(ctx),
		db:    db,
		conn:  conn,
		calls: make(chan *call),
		quit:  make(chan struct{}),
		done:  make(chan struct{}),
		stmts: map[string]*sql.Stmt{},
	}
	if err := w.prepare(ctx); err != nil {
		return nil, errors.Join(err, conn.Close(), db.Close())
	}
	go w.run()
	return w, nil
}

func (w *writer) prepare(ctx context.Context) error {
	var answer string
	if err := w.conn.QueryRowContext(ctx, "PRAGMA quick_check(1)").Scan(&answer); err != nil {
		return classify(err)
	}
	if answer != "ok" {
		return errdefs.New(errdefs.ErrCorrupt, "check: %s", answer)
	}
	if err := w.synchronous(durable); err != nil {
		return err
	}
	return errors.Join(migrate(ctx, w.conn), w.synchronous(relaxed))
}

// close stops accepting calls and waits for the goroutine.
func (w *writer) close() error {
	close(w.quit)
	<-w.done
	var errs []error
	for _, s := range w.stmts {
		errs = append(errs, s.Close())
	}
	return errors.Join(append(errs, w.conn.Close(), w.db.Close())...)
}

// submit runs do in a transaction and waits for its commit. do may run in the
// same transaction as other calls; if it fails, what it did is undone.
func (w *writer) submit(ctx context.Context, kind durability, do func(*tx) error) error {
	if err := w.step(StepWrite); err != nil {
		return err
	}
	c := &call{ctx: ctx, do: do, kind: kind, done: make(chan struct{})}
	select {
	case w.calls <- c:
		<-c.done
		if c.err == nil {
			c.err = w.step(StepCommit)
		}
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	case <-w.quit:
		return errdefs.New(errdefs.ErrUnavailable, "the journal is closed")
	}
}

func (w *writer) step(s Step) error {
	if w.failpoint == nil {
		return nil
	}
	return w.failpoint(s)
}

func (w *writer) run() {
	defer close(w.done)
	for {
		select {
		case c := <-w.calls:
			w.commit(w.gather(c))
		case <-w.quit:
			return
		}
	}
}

// gather adds the calls that wait already.
func (w *writer) gather(first *call) []*call {
	batch := []*call{first}
	for len(batch) < maxBatch {
		select {
		case c := <-w.calls:
			batch = append(batch, c)
		default:
			return batch
		}
	}
	return batch
}

func (w *writer) commit(batch []*call) {
	kind := relaxed
	for _, c := range batch {
		kind = kind || c.kind
	}
	if err := w.transact(batch, kind); err != nil {
		err = classify(err)
		for _, c := range batch {
			if c.err == nil {
				c.err = fmt.Errorf("write journal: %w", err)
			}
		}
	}
	for _, c := range batch {
		close(c.done)
	}
}

// transact runs the batch; an error is of the transaction, not of one call.
func (w *writer) transact(batch []*call, kind durability) error {
	if kind == durable {
		if err := w.synchronous(durable); err != nil {
			return err
		}
		// A failure leaves FULL: slower, not less safe.
		defer func() { _ = w.synchronous(relaxed) }()
	}
	t := &tx{w: w}
	if _, err := t.exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	for _, c := range batch {
		if err := t.savepoint(c); err != nil {
			t.rollback()
			return err
		}
	}
	if _, err := t.exec("COMMIT"); err != nil {
		t.rollback()
		return err
	}
	return nil
}

func (w *writer) synchronous(kind durability) error {
	mode := "NORMAL"
	if kind == durable {
		mode = "FULL"
	}
	_, err := w.conn.ExecContext(w.ctx, "PRAGMA synchronous = "+mode)
	return classify(err)
}

// tx is the open transaction, used by one call at a time.
type tx struct{ w *writer }

// savepoint runs one call so that its failure undoes only its own changes.
func (t *tx) savepoint(c *call) error {
	if c.err = c.ctx.Err(); c.err != nil {
		return nil
	}
	if _, err := t.exec("SAVEPOINT c"); err != nil {
		return err
	}
	if c.err = c.do(t); c.err != nil {
		if _, err := t.exec("ROLLBACK TO c"); err != nil {
			return err
		}
	}
	_, err := t.exec("RELEASE c")
	return err
}

func (t *tx) prepare(query string) (*sql.Stmt, error) {
	if s := t.w.stmts[query]; s != nil {
		return s, nil
	}
	s, err := t.w.conn.PrepareContext(t.w.ctx, query)
	if err == nil {
		t.w.stmts[query] = s
	}
	return s, err
}

// rollback fails only if SQLite has rolled back by itself.
func (t *tx) rollback() { _, _ = t.exec("ROLLBACK") }

// exec runs a constant statement and returns the number of rows it changed.
func (t *tx) exec(query string, args ...any) (int64, error) {
	s, err := t.prepare(query)
	if err != nil {
		return 0, err
	}
	r, err := s.ExecContext(t.w.ctx, args...)
	if err != nil {
		return 0, err
	}
	return r.RowsAffected()
}

// strings returns the first column of a query inside of the transaction.
func (t *tx) strings(query string, args ...any) ([]string, error) {
	s, err := t.prepare(query)
	if err != nil {
		return nil, err
	}
	rows, err := s.QueryContext(t.w.ctx, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var out []string
	for rows.Next() {
		var v string
		if err := rows.Scan(&v); err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, rows.Err()
}
