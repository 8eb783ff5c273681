package forkd

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"forkd.dev/forkd/api/rest"
	"forkd.dev/forkd/internal/errdefs"
)

// receive is a daemon that lists what it gets.
func receive(t *testing.T) (*Client, *[]string) {
	t.Helper()
	got := &[]string{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Content-Type") != rest.Tar {
			t.Errorf("content type %q", r.Header.Get("Content-Type"))
		}
		for a := tar.NewReader(r.Body); ; {
			h, err := a.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				w.WriteHeader(http.StatusBadRequest)
				fmt.Fprint(w, `{"error":"cut","code":"invalid_argument"}`)
				return
			}
			text, _ := io.ReadAll(a)
			if h.Uid != 0 || h.Gid != 0 || h.Uname != "" {
				t.Errorf("%s belongs to %d:%d %q", h.Name, h.Uid, h.Gid, h.Uname)
			}
			*got = append(*got, strings.TrimRight(fmt.Sprintf("%s %o %s%s", h.Name, h.Mode, h.Linkname, text), " "))
		}
		w.Header().Set("Content-Type", rest.NDJSON)
		_ = json.NewEncoder(w).Encode(rest.SnapshotLine{Done: true, Snapshot: &Snapshot{ID: "sn1"}})
	}))
	t.Cleanup(srv.Close)
	c, err := New(Options{BaseURL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	return c, got
}

func TestCopies(t *testing.T) {
	c, got := receive(t)
	dir := t.TempDir()
	if err := errors.Join(
		os.Mkdir(filepath.Join(dir, "app"), 0o750), os.WriteFile(filepath.Join(dir, "app", "run"), []byte("x"), 0o700),
		os.Symlink("run", filepath.Join(dir, "app", "link")), os.WriteFile(filepath.Join(dir, "one:two"), []byte("y"), 0o600),
		os.Chmod(filepath.Join(dir, "app"), 0o750),
	); err != nil {
		t.Fatal(err)
	}
	sn, err := c.CreateSnapshotWith(t.Context(), SnapshotRequest{Tag: "t"}, []Copy{
		{From: filepath.Join(dir, "app"), To: "/srv/app"}, {From: filepath.Join(dir, "one:two"), To: "/etc/"}, {From: filepath.Join(dir, "app", "link"), To: "/bin/../bin/l"},
	}, nil)
	if err != nil || sn.ID != "sn1" {
		t.Fatalf("%+v, %v", sn, err)
	}
	want := `request.json 600 {"tag":"t"}
srv/app/ 750
srv/app/link 777 run
srv/app/run 700 x
etc/one:two 600 y
bin/l 700 x`
	if text := strings.Join(*got, "\n"); text != want {
		t.Errorf("sent\n%s\nwant\n%s", text, want)
	}
}

func TestCopyErrors(t *testing.T) {
	c, _ := receive(t)
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []Copy{{From: dir, To: "rel"}, {From: "", To: "/x"}, {From: filepath.Join(dir, "missing"), To: "/x"}, {From: dir, To: "/srv"}, {From: fifo, To: "/x"}} {
		_, err := c.CreateSnapshotWith(t.Context(), SnapshotRequest{Tag: "t"}, []Copy{bad}, nil)
		if !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
