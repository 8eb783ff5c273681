package rest

import (
	"archive/tar"
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	api "forkd.dev/forkd/api/rest"
)

// withFiles is a body that carries a request and what follows it.
func withFiles(t *testing.T, entry, request string, rest io.Reader) io.Reader {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: entry, Mode: 0o600, Size: int64(len(request))}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, request); err != nil {
		t.Fatal(err)
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	return io.MultiReader(&buf, rest)
}

func TestDecodeWithFiles(t *testing.T) {
	t.Parallel()
	for _, length := range []int{24, 511, 512, 513, 1024} {
		request := `{"name":"x","kernel":"` + strings.Repeat("k", length-24) + `"}`
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", withFiles(t, api.RequestEntry, request, strings.NewReader("the rest")))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", api.Tar)
		var req api.BuildImage
		files, err := decodeWithFiles(nopWriter{}, r, &req)
		if err != nil || req.Name != "x" {
			t.Fatalf("%d bytes: %+v, %v", length, req, err)
		}
		if left, err := io.ReadAll(files); err != nil || string(left) != "the rest" {
			t.Errorf("%d bytes: left is %q, %v", length, left, err)
		}
	}
}

type nopWriter struct{ http.ResponseWriter }

func TestDecodeWithFilesRefuses(t *testing.T) {
	t.Parallel()
	for what, body := range map[string]io.Reader{
		"no archive":    strings.NewReader("{}"),
		"other entry":   withFiles(t, "other.json", "{}", strings.NewReader("")),
		"no JSON":       withFiles(t, api.RequestEntry, "{", strings.NewReader("")),
		"large request": withFiles(t, api.RequestEntry, strings.Repeat(" ", defaultBody+1), strings.NewReader("")),
		"nothing":       strings.NewReader(""),
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "/", body)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", api.Tar)
		var req api.BuildImage
		if _, err := decodeWithFiles(nopWriter{}, r, &req); err == nil {
			t.Errorf("%s is taken", what)
		}
	}
}
