package metadata

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"

	"forkd.dev/forkd/internal/errdefs"
)

// DB is an open journal. All methods may be called concurrently.
type DB struct {
	dir          string
	lock         *os.File
	readers      *sql.DB
	writer       *writer
	failpoint    func(Step) error
	installation string
	closeOnce    sync.Once
	closeErr     error
}

// Config says where the journal lies.
type Config struct {
	Dir string // the data directory; created with mode 0700 if missing
	// Failpoint, if set, is called before each write and after its commit. An error
	// ends the call there, as a crash would.
	Failpoint func(step Step) error
}

// Step is a durable step: after it, a crash may find its effect on disk.
type Step string

// The steps of a write.
const (
	StepWrite  Step = "journal-write"  // nothing is written yet
	StepCommit Step = "journal-commit" // all of it is
)

const (
	fileName = "forkd.db"
	// maxReaders bounds parallel reads: each connection has a page cache of its own.
	maxReaders = 4
)

// Open locks the data directory and opens or creates its journal. It fails with
// ErrConflict if another process has it, ErrIncompatible if a newer forkd wrote
// it, ErrCorrupt if it is damaged.
func Open(ctx context.Context, c Config) (*DB, error) {
	if c.Dir == "" {
		return nil, errdefs.New(errdefs.ErrInvalid, "open journal: no data directory is given")
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("create data directory: %w", classify(err))
	}
	lock, err := lockDir(c.Dir)
	if err != nil {
		return nil, err
	}
	d := &DB{dir: c.Dir, lock: lock, failpoint: c.Failpoint}
	if err := d.open(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open journal %s: %w", d.path(), err), d.Close())
	}
	return d, nil
}

func (d *DB) path() string { return filepath.Join(d.dir, fileName) }

func (d *DB) open(ctx context.Context) error {
	// SQLite would create the file as the umask says.
	f, err := os.OpenFile(d.path(), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return classify(err)
	}
	if err := f.Close(); err != nil {
		return err
	}
	d.writer, err = openWriter(ctx, dsn(d.path(), "journal_mode(wal)", "synchronous(normal)"))
	if err != nil {
		return err
	}
	d.writer.failpoint = d.failpoint
	if err := syncDir(d.dir); err != nil {
		return classify(err)
	}
	d.readers, err = sql.Open("sqlite", dsn(d.path(), "query_only(1)"))
	if err != nil {
		return classify(err)
	}
	d.readers.SetMaxOpenConns(maxReaders)
	d.readers.SetMaxIdleConns(maxReaders)
	err = d.readers.QueryRowContext(ctx, "SELECT value FROM meta WHERE key = 'installation'").Scan(&d.installation)
	return classify(err)
}

func dsn(path string, pragmas ...string) string {
	q := url.Values{"_pragma": append([]string{"busy_timeout(5000)", "foreign_keys(1)"}, pragmas...)}
	return (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String()
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// Installation is the random id of this data directory. It never changes.
func (d *DB) Installation() string { return d.installation }

// Close finishes the writes that were accepted, closes the journal and unlocks
// the data directory. It may be repeated.
func (d *DB) Close() error {
	d.closeOnce.Do(func() {
		var errs []error
		if d.readers != nil {
			errs = append(errs, d.readers.Close())
		}
		if d.writer != nil {
			errs = append(errs, d.writer.close())
		}
		errs = append(errs, d.lock.Close())
		d.closeErr = errors.Join(errs...)
	})
	return d.closeErr
}

// query calls scan for each row of a read.
func (d *DB) query(ctx context.Context, scan func(*sql.Rows) error, query string, args ...any) error {
	rows, err := d.readers.QueryContext(ctx, query, args...)
	if err != nil {
		return d.readError(ctx, err)
	}
	defer func() { _ = rows.Close() }() // its error is that of rows.Err
	for rows.Next() {
		if err := scan(rows); err != nil {
			return d.readError(ctx, err)
		}
	}
	return d.readError(ctx, rows.Err())
}

// readError prefers the cause of a canceled read to SQLite's "interrupted".
func (d *DB) readError(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return classify(err)
}
