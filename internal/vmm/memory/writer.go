package memory

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Writer copies pages into a file, gathering many runs into one system call: a run is
// often a single page.
type Writer struct {
	space  *Space
	fd     int
	parts  [][]byte
	offset int64 // of parts[0] in the file
	end    int64 // after the last part
}

const (
	maxParts = 1024 // IOV_MAX
	// maxGather bounds one call, so that a signal is not held up for long.
	maxGather = 8 << 20
)

// NewWriter writes to an open file, whose descriptor stays the caller's.
func NewWriter(s *Space, fd int) *Writer { return &Writer{space: s, fd: fd} }

// Add has the pages of r written to the file from page slot on.
func (w *Writer) Add(r Run, slot uint64) error {
	at := int64(slot) * PageSize
	if len(w.parts) == maxParts || at != w.end || w.end-w.offset >= maxGather {
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if len(w.parts) == 0 {
		w.offset, w.end = at, at
	}
	w.parts = append(w.parts, w.space.mem[r.Page*PageSize:r.End()*PageSize])
	w.end += int64(r.Count * PageSize)
	return nil
}

// Flush writes what was added.
func (w *Writer) Flush() error {
	for w.offset < w.end {
		n, err := unix.Pwritev(w.fd, w.parts, w.offset)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("copy guest memory: %w", err)
		}
		w.offset += int64(n)
		w.skip(n)
	}
	w.parts = w.parts[:0]
	return nil
}

// skip drops n bytes that were written.
func (w *Writer) skip(n int) {
	i := 0
	for ; i < len(w.parts) && n >= len(w.parts[i]); i++ {
		n -= len(w.parts[i])
	}
	if i < len(w.parts) {
		w.parts[i] = w.parts[i][n:]
	}
	w.parts = append(w.parts[:0], w.parts[i:]...)
}
