package cpio

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

type parsed struct {
	name         string
	mode         uint64
	major, minor uint64
	data         string
}

// parse reads an archive back by the format's description, independent of Writer.
func parse(t *testing.T, b []byte) []parsed {
	t.Helper()
	var out []parsed
	pos := 0
	next := func(n int) []byte {
		if pos+n > len(b) {
			t.Fatalf("archive of %d bytes ends inside an entry at %d", len(b), pos)
		}
		p := b[pos : pos+n]
		pos += n
		return p
	}
	pad := func() {
		for pos%4 != 0 {
			if next(1)[0] != 0 {
				t.Fatalf("padding at %d is not zero", pos-1)
			}
		}
	}
	for {
		if got := string(next(6)); got != "070701" {
			t.Fatalf("magic %q at %d", got, pos-6)
		}
		var f [13]uint64
		for i := range f {
			v, err := strconv.ParseUint(string(next(8)), 16, 32)
			if err != nil {
				t.Fatalf("field %d: %v", i, err)
			}
			f[i] = v
		}
		name := next(int(f[11]))
		pad()
		data := next(int(f[6]))
		pad()
		if name[len(name)-1] != 0 {
			t.Fatalf("name %q has no NUL", name)
		}
		p := parsed{string(name[:len(name)-1]), f[1], f[9], f[10], string(data)}
		if p.name == "TRAILER!!!" {
			if pos != len(b) {
				t.Fatalf("%d bytes after the trailer", len(b)-pos)
			}
			return out
		}
		out = append(out, p)
	}
}

func sample(t *testing.T) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := NewWriter(&buf)
	for _, err := range []error{
		w.Dir("dev", 0o755),
		w.CharDevice("dev/console", 0o600, 5, 1),
		w.CharDevice("dev/null", 0o666, 1, 3),
		w.Dir("modules", 0o755),
		w.File("modules/00-virtio_ring.ko", 0o644, []byte("12345")),
		w.File("empty", 0o600, nil),
		w.File("init", 0o755, []byte("agent")),
		w.Close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return buf.Bytes()
}

func TestStructure(t *testing.T) {
	t.Parallel()
	want := []parsed{
		{"dev", 0o40755, 0, 0, ""},
		{"dev/console", 0o20600, 5, 1, ""},
		{"dev/null", 0o20666, 1, 3, ""},
		{"modules", 0o40755, 0, 0, ""},
		{"modules/00-virtio_ring.ko", 0o100644, 0, 0, "12345"},
		{"empty", 0o100600, 0, 0, ""},
		{"init", 0o100755, 0, 0, "agent"},
	}
	got := parse(t, sample(t))
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("got  %v\nwant %v", got, want)
	}
	if !bytes.Equal(sample(t), sample(t)) {
		t.Fatal("equal content gives different bytes")
	}
}

// TestListingByCpioProgram asks another implementation where there is one; the
// structure is checked in any case.
func TestListingByCpioProgram(t *testing.T) {
	t.Parallel()
	path, err := exec.LookPath("cpio")
	if err != nil {
		t.Log("the cpio program is not installed: its listing was not compared")
		return
	}
	cmd := exec.Command(path, "-t", "--quiet")
	cmd.Stdin = bytes.NewReader(sample(t))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("cpio -t: %v: %s", err, out)
	}
	want := "dev\ndev/console\ndev/null\nmodules\nmodules/00-virtio_ring.ko\nempty\ninit\n"
	if string(out) != want {
		t.Fatalf("got %q, want %q", out, want)
	}
}

func TestBadEntries(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", "/init", "a//b", "../x", "a/../b", "./a", "nodir/file", "TRAILER!!!", "a\x00b", "a/", strings.Repeat("x", 5000)} {
		w := NewWriter(&bytes.Buffer{})
		if err := w.File(name, 0o644, nil); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("File(%.20q) = %v, want ErrInvalid", name, err)
		}
		if err := w.Close(); err == nil {
			t.Errorf("Close after a failed entry %.20q succeeded", name)
		}
	}
	w := NewWriter(&bytes.Buffer{})
	if err := w.File("a", 0o644, nil); err != nil {
		t.Fatal(err)
	}
	if err := w.File("a", 0o644, nil); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("second entry of one name: %v, want ErrInvalid", err)
	}
}

type failing struct{ left int }

func (f *failing) Write(p []byte) (int, error) {
	if len(p) > f.left {
		return 0, errors.New("disk full")
	}
	f.left -= len(p)
	return len(p), nil
}

func TestWriteErrorIsKept(t *testing.T) {
	t.Parallel()
	for left := range 300 {
		w := NewWriter(&failing{left: left})
		_ = w.Dir("d", 0o755)
		_ = w.File("d/f", 0o644, []byte("data"))
		if err := w.Close(); err == nil {
			t.Fatalf("no error with %d bytes of room", left)
		}
	}
}
