package forkd_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/frontend/rest/resttest"
	forkd "forkd.dev/forkd/sdk/go"
)

var errFull = errors.New("disk full")

type fullWriter struct{}

func (fullWriter) Write([]byte) (int, error) { return 0, errFull }

// TestDownloads: logs and packs arrive whole, or the error says which end failed.
func TestDownloads(t *testing.T) {
	short := false
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if short {
			w.Header().Set("Content-Length", "100")
		}
		_, _ = io.WriteString(w, "some bytes")
	})
	c, err := forkd.New(forkd.Options{Socket: resttest.ServeUnix(t, h), Getenv: noEnv})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for what, get := range map[string]func(io.Writer) error{
		"log of sb1":  func(w io.Writer) error { return c.Logs(t.Context(), "sb1", forkd.LogOptions{}, w) },
		"pack of sn1": func(w io.Writer) error { return c.Pack(t.Context(), "sn1", forkd.RefuseSecrets, w) },
	} {
		var got bytes.Buffer
		short = false
		if err := get(&got); err != nil || got.String() != "some bytes" {
			t.Errorf("%s: %q, %v", what, got.String(), err)
		}
		if err := get(fullWriter{}); !errors.Is(err, errFull) || !strings.Contains(err.Error(), "write "+what) {
			t.Errorf("%s to a full disk: %v", what, err)
		}
		short = true
		if err := get(io.Discard); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), what+": the daemon closed") {
			t.Errorf("%s cut short: %v", what, err)
		}
	}
}
