package agentwire

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

func TestAnswers(t *testing.T) {
	var buf bytes.Buffer
	long := strings.Repeat("x", 5000)
	for _, err := range []error{
		WriteAnswer(&buf, "127.0.0.1:3128", nil), WriteAnswer(&buf, "", nil),
		WriteAnswer(&buf, "", errdefs.New(errdefs.ErrConflict, "two\nlines")), WriteAnswer(&buf, long, nil),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got, err := ReadAnswer(&buf); got != "127.0.0.1:3128" || err != nil {
		t.Errorf("first answer %q, %v", got, err)
	}
	if got, err := ReadAnswer(&buf); got != "" || err != nil {
		t.Errorf("second answer %q, %v", got, err)
	}
	if _, err := ReadAnswer(&buf); !errors.Is(err, errdefs.ErrConflict) || err.Error() != "two lines" {
		t.Errorf("third answer %v", err)
	}
	if got, err := ReadAnswer(&buf); err != nil || !strings.HasPrefix(got, "xxx") {
		t.Errorf("long answer %.20q, %v", got, err)
	}
	if _, err := ReadAnswer(&buf); err == nil {
		t.Error("no error at the end")
	}
}

func FuzzReadAnswer(f *testing.F) {
	for _, s := range []string{"ok x\n", "error conflict y\n", "error\n", "\n", "ok", strings.Repeat("a", 3000)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		text, err := ReadAnswer(bytes.NewReader(b))
		if err == nil && !bytes.HasPrefix(b, []byte("ok")) {
			t.Errorf("%.40q was taken for success: %q", b, text)
		}
	})
}
