package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

// TestInspect looks into a directory through a real agent, also while it is frozen.
func TestInspect(t *testing.T) {
	r := startAgent(t)
	c := r.connect()
	big := bytes.Repeat([]byte("0123456789abcdef"), 20_000)
	for name, content := range map[string]string{"srv/a": "hello", "srv/deep/er/b": string(big), "srv/odd\n\xffname": ""} {
		path := filepath.Join(r.root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o640)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(r.root, "srv/link")); err != nil {
		t.Fatal(err)
	}
	if err := c.Prepare(testContext(t), agentwire.Prepare{}); err != nil {
		t.Fatal(err)
	}
	in, err := OpenInspector(testContext(t), c)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	found := map[string]agentwire.FileEntry{}
	if err := in.Walk(func(f agentwire.FileEntry) error {
		found[f.Path] = f
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]struct {
		mode   uint32
		size   int64
		target string
	}{
		"/srv/a": {0o100640, 5, ""}, "/srv/deep/er/b": {0o100640, int64(len(big)), ""}, "/srv/odd\n\xffname": {0o100640, 0, ""},
		"/srv/link": {0o120777, 11, "/etc/passwd"}, "/srv": {0o040755, -1, ""},
	} {
		f, ok := found[path]
		if !ok || f.Mode != want.mode || f.Target != want.target || want.size >= 0 && f.Size != want.size || f.Inode == 0 || f.CTime == 0 {
			t.Errorf("%q is %+v, want %+v", path, f, want)
		}
	}
	if sum, err := in.Digest("/srv/deep/er/b", 1<<20); err != nil || sum != sha256.Sum256(big) {
		t.Errorf("digest: %x, %v", sum, err)
	}
	if got, err := in.Content("/srv/deep/er/b", 1<<20); err != nil || !bytes.Equal(got, big) {
		t.Errorf("content: %d bytes, %v", len(got), err)
	}
	for path, class := range map[string]error{
		"/srv/deep/er/b": errdefs.ErrResourceExhausted, "/srv": errdefs.ErrInvalid, "/srv/link": errdefs.ErrNotFound, "/none": errdefs.ErrNotFound,
	} {
		if _, err := in.Digest(path, 100); errdefs.Class(err) != class {
			t.Errorf("digest of %s: %v", path, err)
		}
	}
	list, memory, err := in.Processes()
	if err != nil || len(list) == 0 || memory.TotalKiB == 0 || memory.AvailableKiB == 0 {
		t.Errorf("%d processes, %+v, %v", len(list), memory, err)
	}
}

// liar is a guest that answers an inspector with any bytes.
type liar struct{ answer []byte }

func (l liar) OpenStream(context.Context, string) (net.Conn, error) {
	near, far := net.Pipe()
	go func() {
		buf := make([]byte, 4096)
		_, _ = far.Read(buf) // the request: head and body come in one or two pieces
		go func() {          // the rest of it
			for {
				if _, err := far.Read(buf); err != nil {
					return
				}
			}
		}()
		_, _ = far.Write(l.answer)
		_ = far.Close()
	}()
	return near, nil
}

func TestInspectDoubtsTheGuest(t *testing.T) {
	part := func(kind agentwire.Part, body []byte) []byte {
		var b bytes.Buffer
		if err := agentwire.WritePart(&b, kind, body); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	relative := (&agentwire.FileEntry{Path: "etc/passwd"}).Append(nil)
	negative := (&agentwire.FileEntry{Path: "/x", Size: -1}).Append(nil)
	for name, answer := range map[string][]byte{
		"nothing":     {},
		"cut":         part(agentwire.PartFile, relative)[:7],
		"huge part":   {0xff, 0xff, 0xff, 0xff, 1},
		"relative":    part(agentwire.PartFile, relative),
		"negative":    part(agentwire.PartFile, negative),
		"other kind":  part(agentwire.PartData, []byte("x")),
		"bad error":   part(agentwire.PartError, []byte("\xff\xff\xff")),
		"early end":   nil,
		"not message": part(agentwire.PartFile, []byte("\x0b\xff")),
	} {
		in, err := OpenInspector(testContext(t), liar{answer})
		if err != nil {
			t.Fatal(err)
		}
		err = in.Walk(func(agentwire.FileEntry) error { return nil })
		if errdefs.Class(err) != errdefs.ErrGuest {
			t.Errorf("%s: %v", name, err)
		}
		_ = in.Close()
	}
	in, err := OpenInspector(testContext(t), liar{append(part(agentwire.PartData, make([]byte, 60)), part(agentwire.PartData, make([]byte, 60))...)})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if _, err := in.Content("/x", 100); err == nil || !strings.Contains(err.Error(), "more than the 100 bytes") {
		t.Errorf("content: %v", err)
	}
}
