package rootfs

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"

	"forkd.dev/forkd/internal/errdefs"
)

// item is an entry in the form of a test.
type item struct {
	tar.Header
	text string
}

func reg(name, text string) item {
	return item{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(text)), Uid: os.Getuid(), Gid: os.Getgid()}, text}
}

func other(kind byte, name, to string) item {
	return item{tar.Header{Typeflag: kind, Name: name, Linkname: to, Mode: 0o755, Uid: os.Getuid(), Gid: os.Getgid()}, ""}
}

func pack(t testing.TB, items ...item) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, it := range items {
		if err := w.WriteHeader(&it.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, it.text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func limits() Limits { return Limits{Bytes: 1 << 20, Entries: 100} }

// extract unpacks into a directory below one that must not change.
func extract(t testing.TB, data []byte) (dir string, res Result, err error) {
	t.Helper()
	outside := t.TempDir()
	dir = filepath.Join(outside, "root")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(outside, "secret"), []byte("secret"), 0o600)); err != nil {
		t.Fatal(err)
	}
	res, err = Extract(context.Background(), bytes.NewReader(data), dir, limits(), func(int64) {})
	entries, rerr := os.ReadDir(outside)
	if rerr != nil || len(entries) != 2 {
		t.Errorf("outside of the root: %v, %v", entries, rerr)
	}
	if info, serr := os.Stat(filepath.Join(outside, "secret")); serr != nil || info.Mode() != 0o600 || info.Size() != 6 {
		t.Errorf("a file outside was changed: %v, %v", info, serr)
	}
	return dir, res, err
}

func TestExtract(t *testing.T) {
	stamp := time.Unix(1_500_000_000, 0)
	suid := reg("usr/bin/su", "elf")
	suid.Mode, suid.ModTime = 0o4755, stamp
	items := []item{
		other(tar.TypeDir, "./", ""), other(tar.TypeDir, "usr/", ""), suid,
		reg("/etc/passwd", "root:x:0:0"), other(tar.TypeSymlink, "bin", "usr/bin"), other(tar.TypeLink, "usr/bin/sudo", "usr/bin/su"),
		reg("bin/ls", "through a relative link"), other(tar.TypeSymlink, "var/run", "/run"), other(tar.TypeFifo, "pipe", ""),
		reg("etc/passwd", "again"),
	}
	data := pack(t, items...)
	for name, packed := range map[string][]byte{"plain": data, "gzip": zip(t, data), "zstd": zstandard(t, data), "xz": xzip(t, data)} {
		t.Run(name, func(t *testing.T) {
			dir, res, err := extract(t, packed)
			if err != nil {
				t.Fatal(err)
			}
			if res.Entries != len(items) || !strings.HasPrefix(res.Digest, "sha256:") {
				t.Errorf("result %+v", res)
			}
			info, err := os.Stat(filepath.Join(dir, "usr/bin/sudo"))
			if err != nil || info.Mode() != 0o755|fs.ModeSetuid || !info.ModTime().Equal(stamp) {
				t.Errorf("sudo: %v, %v", info, err)
			}
			if b, err := os.ReadFile(filepath.Join(dir, "etc/passwd")); string(b) != "again" {
				t.Errorf("passwd %q, %v", b, err)
			}
			if _, err := os.Stat(filepath.Join(dir, "usr/bin/ls")); err != nil {
				t.Error(err)
			}
			if to, err := os.Readlink(filepath.Join(dir, "var/run")); to != "/run" {
				t.Errorf("var/run -> %q, %v", to, err)
			}
		})
	}
}

// TestHostile: none of these may do anything outside of the root.
func TestHostile(t *testing.T) {
	huge := reg("huge", "")
	huge.Size = 2 << 20
	many := []item{}
	for range 101 {
		many = append(many, other(tar.TypeDir, "d/", ""))
	}
	for name, data := range map[string][]byte{
		"dots":                   pack(t, reg("../secret", "x")),
		"dots inside":            pack(t, reg("a/../../secret", "x")),
		"link out, then through": pack(t, other(tar.TypeSymlink, "out", ".."), reg("out/secret", "x")),
		"absolute link, through": pack(t, other(tar.TypeSymlink, "out", "/tmp"), reg("out/forkd-escape", "x")),
		"link to a link":         pack(t, other(tar.TypeSymlink, "a", "b"), other(tar.TypeSymlink, "b", "../.."), reg("a/x", "x")),
		"hard link out":          pack(t, other(tar.TypeLink, "in", "../secret")),
		"hard link absolute":     pack(t, other(tar.TypeLink, "in", "/etc/passwd")),
		"hard link by a link":    pack(t, other(tar.TypeSymlink, "out", ".."), other(tar.TypeLink, "in", "out/secret")),
		"directory over a link":  pack(t, other(tar.TypeSymlink, "d", ".."), other(tar.TypeDir, "d/e/", "")),
		"file over a directory":  pack(t, other(tar.TypeDir, "d/", ""), reg("d", "x")),
		"root is a file":         pack(t, reg(".", "x")),
		"too many bytes":         zip(t, append(pack(t)[:0], header(t, huge)...)),
		"too many entries":       pack(t, many...),
		"cut":                    pack(t, reg("a", strings.Repeat("x", 2000)))[:1200],
		"no archive":             []byte(strings.Repeat("garbage ", 200)),
		"nothing":                nil,
		"empty archive":          pack(t),
		"cut gzip":               zip(t, pack(t, reg("a", "x")))[:20],
		"unknown type":           pack(t, other('Z', "a", "")),
		"negative owner":         pack(t, item{tar.Header{Typeflag: tar.TypeReg, Name: "a", Uid: -5, Format: tar.FormatGNU}, ""}),
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := extract(t, data)
			if class := errdefs.Class(err); class != errdefs.ErrInvalid && class != errdefs.ErrUnsupported {
				t.Errorf("error %v of class %v", err, class)
			}
			if _, err := os.Lstat("/tmp/forkd-escape"); err == nil {
				t.Error("a file was written outside")
			}
		})
	}
}

// TestLinkModes: a mode is not set through a link.
func TestLinkModes(t *testing.T) {
	dir, _, err := extract(t, pack(t, other(tar.TypeSymlink, "l", "../secret"), other(tar.TypeSymlink, "l", "../secret")))
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(filepath.Join(dir, "l")); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("%v, %v", info, err)
	}
}

func TestDevices(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("device nodes need root")
	}
	null := item{tar.Header{Typeflag: tar.TypeChar, Name: "dev/null", Mode: 0o666, Devmajor: 1, Devminor: 3}, ""}
	owned := reg("home/u/file", "x")
	owned.Uid, owned.Gid = 1000, 1001
	owned.PAXRecords = map[string]string{"SCHILY.xattr.user.x": "y"}
	dir, _, err := extract(t, pack(t, null, owned))
	if err != nil {
		t.Skipf("this file system takes no devices or attributes: %v", err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(dir, "dev/null"), &st); err != nil || st.Rdev != 0x103 || st.Mode != syscall.S_IFCHR|0o666 {
		t.Errorf("dev/null: %+v, %v", st, err)
	}
	if err := syscall.Stat(filepath.Join(dir, "home/u/file"), &st); err != nil || st.Uid != 1000 || st.Gid != 1001 {
		t.Errorf("owner %d:%d, %v", st.Uid, st.Gid, err)
	}
	bad := null
	bad.Devmajor = 1 << 20
	if _, _, err := extract(t, pack(t, bad)); errdefs.Class(err) != errdefs.ErrInvalid {
		t.Errorf("device out of range: %v", err)
	}
}

func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Extract(ctx, bytes.NewReader(pack(t, reg("a", "x"))), t.TempDir(), limits(), func(int64) {})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

func FuzzExtract(f *testing.F) {
	f.Add(pack(f, reg("a/b", "x"), other(tar.TypeSymlink, "l", "a"), other(tar.TypeLink, "h", "a/b")))
	f.Add(pack(f, other(tar.TypeSymlink, "out", ".."), reg("out/x", "y")))
	f.Fuzz(func(t *testing.T, data []byte) { _, _, _ = extract(t, data) })
}

func header(t testing.TB, it item) []byte {
	t.Helper()
	var buf bytes.Buffer
	if err := tar.NewWriter(&buf).WriteHeader(&it.Header); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func zip(t testing.TB, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	return finish(t, w, &buf, b)
}

func zstandard(t testing.TB, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w, err := zstd.NewWriter(&buf)
	if err != nil {
		t.Fatal(err)
	}
	return finish(t, w, &buf, b)
}

func xzip(t testing.TB, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w, err := xz.NewWriter(&buf)
	if err != nil {
		t.Fatal(err)
	}
	return finish(t, w, &buf, b)
}

func finish(t testing.TB, w io.WriteCloser, buf *bytes.Buffer, b []byte) []byte {
	t.Helper()
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}
