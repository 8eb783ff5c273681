package rest

import (
	"net/http/httptest"
	"testing"
	"time"

	api "forkd.dev/forkd/api/rest"
)

// deadlines records the write deadlines a stream sets.
type deadlines struct {
	*httptest.ResponseRecorder
	set []time.Time
}

func (d *deadlines) SetWriteDeadline(t time.Time) error {
	d.set = append(d.set, t)
	return nil
}

// TestLineDeadlineIsTakenBack: a connection that is used again after a stream must
// not carry the deadline of its last line.
func TestLineDeadlineIsTakenBack(t *testing.T) {
	d := &deadlines{ResponseRecorder: httptest.NewRecorder()}
	s := &stream{w: &recorder{ResponseWriter: d}}
	if s.started() {
		t.Error("started before a line")
	}
	s.line(api.ForkLine{Done: true})
	if len(d.set) != 2 || d.set[0].IsZero() || !d.set[1].IsZero() {
		t.Errorf("deadlines: %v", d.set)
	}
	if !s.started() || !d.Flushed || d.Body.String() != "{\"done\":true}\n" {
		t.Errorf("line: %q, flushed %v", d.Body.String(), d.Flushed)
	}
}
