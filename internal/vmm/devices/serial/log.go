package serial

import (
	"fmt"
	"os"

	"forkd.dev/forkd/internal/errdefs"
)

// minLog keeps the moves of a full Log rare.
const minLog = 4 << 10

// Log is a file that keeps the end of what was written to it, between half of its limit and the limit.
// A reader of the file sees it whole but for the moment in which it is cut. It is for one goroutine at a time.
type Log struct {
	f     *os.File
	limit int64
	size  int64
}

// NewLog appends to f, which stays the caller's, and keeps it at most limit bytes long (at least 4 KiB).
func NewLog(f *os.File, limit int64) (*Log, error) {
	if limit < minLog {
		return nil, errdefs.New(errdefs.ErrInvalid, "console log of %d bytes, at least %d are needed", limit, minLog)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open console log: %w", err)
	}
	return &Log{f: f, limit: limit, size: st.Size()}, nil
}

// Write implements io.Writer. Of more than half the limit at once only the end is kept.
func (l *Log) Write(p []byte) (int, error) {
	n := len(p)
	if keep := int(l.limit / 2); len(p) > keep {
		p = p[len(p)-keep:]
	}
	if l.size+int64(len(p)) > l.limit {
		if err := l.cut(); err != nil {
			return 0, fmt.Errorf("cut console log: %w", err)
		}
	}
	if _, err := l.f.WriteAt(p, l.size); err != nil {
		return 0, fmt.Errorf("write console log: %w", err)
	}
	l.size += int64(len(p))
	return n, nil
}

// cut moves the second half of the limit to the start.
func (l *Log) cut() error {
	b := make([]byte, min(l.limit/2, l.size))
	if _, err := l.f.ReadAt(b, l.size-int64(len(b))); err != nil {
		return err
	}
	if _, err := l.f.WriteAt(b, 0); err != nil {
		return err
	}
	l.size = int64(len(b))
	return l.f.Truncate(l.size)
}
