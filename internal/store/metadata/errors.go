package metadata

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"forkd.dev/forkd/internal/errdefs"
)

// classify gives an error of SQLite or the operating system its class.
func classify(err error) error {
	var se *sqlite.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &se):
		return errdefs.As(classOf(se.Code()), err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return errdefs.As(errdefs.ErrPermission, err)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errdefs.As(errdefs.ErrResourceExhausted, err)
	}
	return err
}

func classOf(code int) error {
	switch code & 0xff { // the rest is the extended code
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return errdefs.ErrCorrupt
	case sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM:
		return errdefs.ErrResourceExhausted
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return errdefs.ErrUnavailable
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM:
		return errdefs.ErrPermission
	case sqlite3.SQLITE_INTERRUPT:
		return errdefs.ErrCanceled
	case sqlite3.SQLITE_CONSTRAINT:
		return errdefs.ErrConflict
	}
	return errdefs.ErrInternal
}

// isConstraint tells whether err says that a row would break the rule with that
// extended code.
func isConstraint(err error, code int) bool {
	var se *sqlite.Error
	return errors.As(err, &se) && se.Code() == code
}

func isDuplicate(err error) bool {
	return isConstraint(err, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY) || isConstraint(err, sqlite3.SQLITE_CONSTRAINT_UNIQUE)
}

func isMissingReference(err error) bool {
	return isConstraint(err, sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY)
}
