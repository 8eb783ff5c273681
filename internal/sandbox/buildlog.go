package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
)

// Build logs. What the making of a snapshot or an image did and printed lies in
// <data>/logs/<id>.log, at most about 1 MiB: the first part as it came, and the
// end. It is removed with its object; that of a failed build goes at once, and its
// last lines stand in the error.

const (
	logHeadBytes = 768 << 10
	logTailBytes = 256 << 10
	// errorLines is how much of a failed build's log goes into its error.
	errorLines = 50
	logSuffix  = ".log"
)

// buildLog is the log of one build under way. Its methods may be called concurrently.
type buildLog struct {
	id, title string

	mu sync.Mutex
	// +checklocks:mu
	file *os.File // nil once it is closed, or where no log is kept
	// +checklocks:mu
	written int
	// +checklocks:mu
	tail []byte // the end of all that came, also what is in the file
	// +checklocks:mu
	dropped int // bytes that came after the head and are in no place yet
	// +checklocks:mu
	changed chan struct{} // closed at the next change
	// +checklocks:mu
	printed bool // it holds more than our own steps
	// +checklocks:mu
	ended bool
}

// buildLogs knows the logs of builds under way.
type buildLogs struct {
	dir string // "" keeps nothing on disk

	mu sync.Mutex
	// +checklocks:mu
	open map[string]*buildLog // by id
}

func (ls *buildLogs) path(id string) string { return filepath.Join(ls.dir, id+logSuffix) }

// start begins the log of object id, which will be called title.
func (ls *buildLogs) start(id, title string) (*buildLog, error) {
	l := &buildLog{id: id, title: title, changed: make(chan struct{})}
	if ls.dir != "" {
		f, err := os.OpenFile(ls.path(id), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, fmt.Errorf("start build log: %w", err)
		}
		l.file = f
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.open == nil {
		ls.open = map[string]*buildLog{}
	}
	ls.open[id] = l
	return l, nil
}

// finish ends a log. If the build failed, the file goes and the error gets the
// log's last lines; else it is kept for object id, which may have been unknown at
// the start.
func (ls *buildLogs) finish(l *buildLog, id string, failed error) error {
	ls.mu.Lock()
	delete(ls.open, l.id)
	ls.mu.Unlock()
	lines := l.close()
	if failed != nil {
		ls.remove(l.id)
		return withLog(failed, lines)
	}
	if ls.dir != "" && id != l.id {
		// The object is made; that its log is lost is no reason to say otherwise. What
		// stays under the old name goes at the next start.
		_ = os.Rename(ls.path(l.id), ls.path(id))
	}
	return nil
}

// remove removes the log of an object. There may be none.
func (ls *buildLogs) remove(id string) {
	if ls.dir != "" && id != "" {
		_ = os.Remove(ls.path(id)) // one that stays goes at the next start
	}
}

// sweep removes the logs of objects that known does not list.
func (ls *buildLogs) sweep(known map[string]bool) error {
	if ls.dir == "" {
		return nil
	}
	if err := os.MkdirAll(ls.dir, 0o700); err != nil {
		return fmt.Errorf("create log directory: %w", err)
	}
	entries, err := os.ReadDir(ls.dir)
	if err != nil {
		return fmt.Errorf("list build logs: %w", err)
	}
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), logSuffix); ok && !known[id] {
			ls.remove(id)
		}
	}
	return nil
}

// find returns the log under way whose object is called ref.
func (ls *buildLogs) find(ref string) *buildLog {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for id, l := range ls.open {
		if id == ref || l.title == ref {
			return l
		}
	}
	return nil
}

// read returns the log of a finished object.
func (ls *buildLogs) read(id string) ([]byte, error) {
	if ls.dir == "" || ident.KindOf(id) == "" {
		return nil, errdefs.New(errdefs.ErrNotFound, "there is no build log of %s", id)
	}
	b, err := os.ReadFile(ls.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.ErrNotFound, "there is no build log of %s: it was not built here", id)
	}
	if err != nil {
		return nil, fmt.Errorf("read build log of %s: %w", id, err)
	}
	return b, nil
}

// step notes what the build does now.
func (l *buildLog) step(format string, args ...any) {
	text := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " ")
	_, _ = fmt.Fprintf(l, "%s ==> %s\n", time.Now().UTC().Format(time.TimeOnly), text)
}

// output notes what a program printed, and ends its last line.
func (l *buildLog) output(b []byte) {
	if len(b) == 0 {
		return
	}
	if b[len(b)-1] != '\n' {
		b = append(bytes.Clone(b), '\n')
	}
	l.mu.Lock()
	l.printed = true
	l.mu.Unlock()
	_, _ = l.Write(b)
}

// follow returns a progress that also notes each new step in the log.
func (l *buildLog) follow(progress Progress) Progress {
	var mu sync.Mutex
	last := ""
	return func(step string, fraction float64) {
		mu.Lock()
		news := step != last
		last = step
		mu.Unlock()
		if news {
			l.step("%s", step)
		}
		progress(step, fraction)
	}
}

// lineWriter passes whole lines of an image build on as output.
type lineWriter struct{ l *buildLog }

func (w lineWriter) Write(p []byte) (int, error) {
	w.l.output(p)
	return len(p), nil
}

// Write adds to the log. It never fails: a log is worth less than what it is about.
func (l *buildLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return len(p), nil
	}
	// The file is local and small; the lock keeps its lines in order.
	fits := min(len(p), logHeadBytes-l.written)
	if l.file != nil && fits > 0 {
		_, _ = l.file.Write(p[:fits])
	}
	l.written += fits
	l.dropped += len(p) - fits
	l.tail = append(l.tail, p...)
	if over := len(l.tail) - logTailBytes; over > 0 {
		l.tail = append(l.tail[:0], l.tail[over:]...)
	}
	close(l.changed)
	l.changed = make(chan struct{})
	return len(p), nil
}

// close writes the end that did not fit into the head and returns the last lines.
func (l *buildLog) close() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended {
		l.ended = true
		if l.file != nil {
			rest := l.tail[len(l.tail)-min(l.dropped, len(l.tail)):]
			if left := l.dropped - len(rest); left > 0 {
				_, _ = fmt.Fprintf(l.file, "\n[%d bytes are left out]\n", left)
			}
			_, _ = l.file.Write(rest)
			_ = l.file.Close()
			l.file = nil
		}
		close(l.changed)
	}
	if !l.printed {
		return ""
	}
	return lastLines(string(l.tail), errorLines)
}

// since returns what came after the first offset bytes, how much there is, whether
// more can come, and what tells that it came. Bytes that are kept nowhere are
// left out.
func (l *buildLog) since(offset int) (b []byte, total int, more bool, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	total = l.written + l.dropped
	b = bytes.Clone(l.tail[len(l.tail)-min(max(total-offset, 0), len(l.tail)):])
	return b, total, !l.ended, l.changed
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(strings.ToValidUTF8(text, "?")), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// withLog adds the last lines of a log to the error of a build, which keeps its
// class and hint.
func withLog(err error, lines string) error {
	if lines == "" || errors.Is(err, errdefs.ErrCanceled) {
		return err
	}
	return fmt.Errorf("%w\nlast lines of the build log:\n%s", err, lines)
}
