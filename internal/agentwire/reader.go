package agentwire

import (
	"bytes"
	"io"

	"forkd.dev/forkd/internal/errdefs"
)

// DamagedError says that bytes between two marks were no frame. The reader goes
// on behind them.
type DamagedError struct{ Why string }

func (e *DamagedError) Error() string { return "damaged frame: " + e.Why }

// Unwrap gives the class.
func (e *DamagedError) Unwrap() error { return errdefs.ErrCorrupt }

// Reader takes frames out of a byte stream. It uses bounded memory whatever it
// reads. It is not safe for concurrent use.
type Reader struct {
	r     io.Reader
	buf   []byte
	start int  // buf[start:] is not yet parsed
	seen  int  // buf[start:seen] holds no mark
	skip  bool // up to the next mark: it belongs to a frame already told to be damaged
}

const readerChunk = 4 << 10

// NewReader returns a reader of frames from r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next returns the next frame; its payload is valid until the next call. It
// returns a *DamagedError for bytes that are no frame (Next may be called again),
// or the error of the underlying reader.
func (r *Reader) Next() (Frame, error) {
	for {
		if i := bytes.IndexByte(r.buf[r.seen:], Mark); i >= 0 {
			raw := r.buf[r.start : r.seen+i]
			r.start = r.seen + i + 1
			r.seen = r.start
			switch {
			case r.skip:
				r.skip = false
				continue
			case len(raw) == 0: // a mark alone aborts nothing
				continue
			}
			f, why := parseFrame(raw)
			if why != "" {
				return Frame{}, &DamagedError{Why: why}
			}
			return f, nil
		}
		r.seen = len(r.buf)
		tooLong := !r.skip && r.seen-r.start > maxEncoded
		if r.skip = r.skip || tooLong; r.skip {
			r.buf, r.start, r.seen = r.buf[:0], 0, 0
		}
		if tooLong {
			return Frame{}, &DamagedError{Why: "too long"}
		}
		if err := r.fill(); err != nil {
			return Frame{}, err
		}
	}
}

// fill reads at least one byte.
func (r *Reader) fill() error {
	if r.start > 0 {
		n := copy(r.buf, r.buf[r.start:])
		r.buf = r.buf[:n]
		r.seen -= r.start
		r.start = 0
	}
	if cap(r.buf)-len(r.buf) < readerChunk {
		grown := make([]byte, len(r.buf), max(2*cap(r.buf), 2*readerChunk))
		copy(grown, r.buf)
		r.buf = grown
	}
	n, err := r.r.Read(r.buf[len(r.buf):cap(r.buf)])
	r.buf = r.buf[:len(r.buf)+n]
	switch {
	case n > 0:
		return nil
	case err == nil:
		return io.ErrNoProgress
	}
	return err
}
