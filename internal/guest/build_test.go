package guest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/agentwire"
	"forkd.dev/forkd/internal/errdefs"
)

func archive(t *testing.T, headers ...tar.Header) *bytes.Buffer {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range headers {
		content := ""
		if h.Typeflag == tar.TypeReg {
			content, h.Linkname = h.Linkname, ""
			h.Size = int64(len(content))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &buf
}

func TestUnpack(t *testing.T) {
	r := startAgent(t)
	c := r.connect()
	stamp := time.Unix(1_600_000_000, 0)
	err := Unpack(testContext(t), c, archive(t,
		tar.Header{Typeflag: tar.TypeDir, Name: "srv/app/", Mode: 0o750},
		tar.Header{Typeflag: tar.TypeReg, Name: "srv/app/run.sh", Linkname: "#!/bin/sh\n", Mode: 0o4755, ModTime: stamp, Uid: 12},
		tar.Header{Typeflag: tar.TypeSymlink, Name: "srv/app/link", Linkname: "run.sh"},
		tar.Header{Typeflag: tar.TypeLink, Name: "srv/app/hard", Linkname: "srv/app/run.sh"},
		tar.Header{Typeflag: tar.TypeReg, Name: "../../../../outside", Linkname: "x"},
	))
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(r.root, "srv/app/run.sh"))
	if err != nil || info.Mode() != 0o755 || !info.ModTime().Equal(stamp) {
		t.Errorf("run.sh: %v, %v", info, err)
	}
	if b, err := os.ReadFile(filepath.Join(r.root, "srv/app/hard")); string(b) != "#!/bin/sh\n" {
		t.Errorf("hard link: %q, %v", b, err)
	}
	if _, err := os.Stat(filepath.Join(r.root, "outside")); err != nil {
		t.Errorf("a dotted name left the root: %v", err)
	}
	// Again, over what is there.
	if err := Unpack(testContext(t), c, archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "srv/app/link", Linkname: "plain"})); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(filepath.Join(r.root, "srv/app/link")); err != nil || !info.Mode().IsRegular() {
		t.Errorf("a link was written through: %v, %v", info, err)
	}
}

func TestUnpackErrors(t *testing.T) {
	c := newClient(t)
	wantClass(t, Unpack(testContext(t), c, archive(t, tar.Header{Typeflag: tar.TypeDir, Name: "d"}, tar.Header{Typeflag: tar.TypeReg, Name: "d"})), errdefs.ErrConflict)
	wantClass(t, Unpack(testContext(t), c, archive(t, tar.Header{Typeflag: tar.TypeBlock, Name: "b"})), errdefs.ErrUnsupported)
	wantClass(t, Unpack(testContext(t), c, strings.NewReader(strings.Repeat("no archive ", 1000))), errdefs.ErrInvalid)
	// The reason comes although far more is still to be sent.
	wantClass(t, Unpack(testContext(t), c, io.MultiReader(strings.NewReader(strings.Repeat("x", 4096)), io.LimitReader(zeros{}, 64<<20))), errdefs.ErrInvalid)
	ctx, cancel := context.WithCancel(testContext(t))
	r, w := io.Pipe()
	go func() {
		_, _ = w.Write(make([]byte, 10))
		cancel()
		w.CloseWithError(errors.New("source ended"))
	}()
	if err := Unpack(ctx, c, r); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled copy: %v", err)
	}
	mustExec(t, c, "/bin/true")
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestBuildNetwork(t *testing.T) {
	r := startAgent(t)
	c := r.connect()
	ctx := testContext(t)
	settings := func() io.Reader {
		return archive(t, tar.Header{Typeflag: tar.TypeReg, Name: agentwire.BuildDir[1:] + "/pip.conf", Linkname: "[global]\n"})
	}
	b, err := OpenBuild(ctx, c, settings())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(r.root, agentwire.BuildDir, "pip.conf")); err != nil {
		t.Error(err)
	}
	if _, err := OpenBuild(ctx, c, settings()); !errors.Is(err, errdefs.ErrConflict) {
		t.Errorf("second network: %v", err)
	}
	if _, err := OpenBuild(ctx, c, archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "etc/passwd"})); !errors.Is(err, errdefs.ErrConflict) {
		t.Errorf("third network: %v", err)
	}
	inside, err := net.Dial("tcp", b.Proxy)
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	outside, err := b.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	if _, err := io.WriteString(inside, "ping"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4)
	if _, err := io.ReadFull(outside, buf); err != nil || string(buf) != "ping" {
		t.Fatalf("read %q, %v", buf, err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := b.Accept(ctx)
		waiting <- err
	}()
	if err := b.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; err == nil {
		t.Error("a connection was accepted after the end")
	}
	if _, err := inside.Read(buf); err == nil {
		t.Error("a connection outlived its build")
	}
	if conn, err := net.Dial("tcp", b.Proxy); err == nil {
		conn.Close()
		t.Error("the proxy outlived its build")
	}
	for _, dir := range []string{agentwire.BuildDir, agentwire.BuildCacheDir} {
		if _, err := os.Stat(filepath.Join(r.root, dir)); err == nil {
			t.Errorf("%s is left", dir)
		}
	}
	if _, err := OpenBuild(ctx, c, archive(t, tar.Header{Typeflag: tar.TypeReg, Name: "etc/passwd"})); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("a setting elsewhere: %v", err)
	}
	if b, err = OpenBuild(ctx, c, settings()); err != nil {
		t.Fatalf("next build: %v", err)
	}
	if err := b.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestBuildNetworkEndsWithHost: a daemon that died leaves no proxy behind.
func TestBuildNetworkEndsWithHost(t *testing.T) {
	r := startAgent(t)
	b, err := OpenBuild(testContext(t), r.connect(), archive(t))
	if err != nil {
		t.Fatal(err)
	}
	c := r.connect()
	for {
		conn, err := net.Dial("tcp", b.Proxy)
		if err != nil {
			break
		}
		conn.Close()
		mustExec(t, c, "/bin/true")
	}
}

func TestStart(t *testing.T) {
	r := startAgent(t)
	c := r.connect()
	ctx := testContext(t)
	p, err := Start(ctx, c, agentwire.ExecRequest{Argv: []string{"/bin/sh", "-c", "echo started $X; exec sleep 60"}, Env: map[string]string{"X": "y"}})
	if err != nil {
		t.Fatal(err)
	}
	var log []byte
	for string(log) != "started y\n" {
		if log, err = StartLog(ctx, c, 0); err != nil {
			t.Fatal(err)
		}
	}
	if log, err = StartLog(ctx, c, 8); err != nil || string(log) != "y\n" {
		t.Errorf("log from 8: %q, %v", log, err)
	}
	p.Leave()
	if res := mustExec(t, c, "/bin/sh", "-c", "kill -0 "+strconv.Itoa(p.PID)); res.ExitCode != 0 {
		t.Errorf("the program ended when it was left: %s", res.Stderr)
	}
	p, err = Start(ctx, c, agentwire.ExecRequest{Argv: []string{"/bin/sh", "-c", "echo no >&2; exit 3"}})
	if err != nil {
		t.Fatal(err)
	}
	if code, ok := <-p.Exited(); !ok || code != 3 {
		t.Errorf("exit code %d, %v", code, ok)
	}
	p.Leave()
	if log, err = StartLog(ctx, c, 0); err != nil || string(log) != "no\n" {
		t.Errorf("log %q, %v", log, err)
	}
	if _, err = Start(ctx, c, agentwire.ExecRequest{Argv: []string{"/no/such/program"}}); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("missing program: %v", err)
	}
}
