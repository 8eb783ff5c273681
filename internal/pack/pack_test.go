package pack

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/errdefs"
)

// memory is a file in memory; what is zero in it is a hole.
type memory struct{ *bytes.Reader }

func (memory) Close() error { return nil }

func (m memory) NextData(off int64) (int64, int64, bool, error) {
	return off, m.Size(), off < m.Size(), nil
}

func open(files map[string][]byte) func(string) (Content, error) {
	return func(name string) (Content, error) { return memory{bytes.NewReader(files[name])}, nil }
}

// describe scans files in the order of their names.
func describe(t testing.TB, files map[string][]byte) Manifest {
	t.Helper()
	m := Manifest{Snapshot: "sn00000000000000000001", Tag: "x", CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		f, err := Scan(t.Context(), name, memory{bytes.NewReader(files[name])}, int64(len(files[name])))
		if err != nil {
			t.Fatal(err)
		}
		m.Files = append(m.Files, f)
	}
	return m
}

func packed(t testing.TB, files map[string][]byte) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := Write(t.Context(), &out, describe(t, files), open(files)); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// buffer is a target in memory.
type buffer struct {
	b      []byte
	closed bool
}

func (b *buffer) WriteAt(p []byte, off int64) (int, error) { return copy(b.b[off:], p), nil }
func (b *buffer) Close() error                             { b.closed = true; return nil }

var limits = Limits{MaxBytes: 64 << 20, MaxSize: 64 << 20}

// unpacked reads a pack. The files are those that were begun.
func unpacked(ctx context.Context, pack []byte, l Limits) (map[string]*buffer, error) {
	r, err := Open(bytes.NewReader(pack), l)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	out := map[string]*buffer{}
	return out, r.Extract(ctx, func(f File) (Target, error) {
		out[f.Name] = &buffer{b: make([]byte, f.Size)}
		return out[f.Name], nil
	})
}

func samples() map[string][]byte {
	noise := make([]byte, 300<<10)
	for i := range noise {
		noise[i] = byte(rand.IntN(256))
	}
	sparse := make([]byte, 5<<20+123)
	copy(sparse[1<<20:], noise)
	sparse[len(sparse)-1] = 1
	return map[string][]byte{
		"a/text": []byte("hello"), "a/empty": nil, "b": noise, "c/zeros": make([]byte, 1<<20), "c/sparse": sparse,
		strings.Repeat("d/", 60) + strings.Repeat("x", 100): []byte("long name"),
	}
}

func TestRoundTrip(t *testing.T) {
	files := samples()
	raw := packed(t, files)
	if len(raw) > 800<<10 {
		t.Errorf("the pack has %d bytes: holes are stored", len(raw))
	}
	got, err := unpacked(t.Context(), raw, limits)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		if b := got[name]; b == nil || !bytes.Equal(b.b, want) || !b.closed {
			t.Errorf("file %s differs", name)
		}
	}
	m := describe(t, files)
	r, err := Open(bytes.NewReader(raw), limits)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if have := r.Manifest(); have.Snapshot != m.Snapshot || have.StoredBytes() != m.StoredBytes() || have.Version != Version {
		t.Errorf("manifest is %+v", have)
	}
	// Files that are there already are only checked.
	if err := r.Extract(t.Context(), func(File) (Target, error) { return nil, nil }); err != nil {
		t.Errorf("only checked: %v", err)
	}
}

// raw builds an archive entry by entry, as no writer of ours would.
type raw struct {
	manifest any // Manifest, or text
	entries  []tar.Header
	data     [][]byte
	tail     []byte
}

func (r raw) bytes(t testing.TB) []byte {
	t.Helper()
	text, ok := r.manifest.(string)
	if !ok {
		b, err := json.Marshal(r.manifest)
		if err != nil {
			t.Fatal(err)
		}
		text = string(b)
	}
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	write := func(h tar.Header, b []byte) {
		h.Mode = 0o600
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	write(tar.Header{Typeflag: tar.TypeReg, Name: ManifestName, Size: int64(len(text))}, []byte(text))
	for i, h := range r.entries {
		write(h, r.data[i])
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := z.Write(r.tail); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// honest is an archive with one file, to be spoilt.
func honest() (raw, *Manifest) {
	text := []byte("hello")
	m := &Manifest{
		Version: 1, Snapshot: "sn00000000000000000001", CreatedAt: time.Unix(1, 0).UTC(),
		Files: []File{{Name: "a", Size: 5, Stored: 5, SHA256: sum(text)}},
	}
	return raw{manifest: m, entries: []tar.Header{{Typeflag: tar.TypeReg, Name: "a", Size: 5}}, data: [][]byte{text}}, m
}

// TestHostile: each kind of hostile pack is refused with its reason. Unless the row
// says so, not a single target was asked for.
func TestHostile(t *testing.T) {
	const corrupt, incompatible, exhausted = "corrupt", "incompatible", "resource_exhausted"
	for _, c := range []struct {
		name  string
		spoil func(*raw, *Manifest)
		code  string
		text  string
		begun bool // the file itself is what is wrong
	}{
		{"path traversal", func(_ *raw, m *Manifest) { m.Files[0].Name = "../../etc/passwd" }, corrupt, "plain relative", false},
		{"dots inside", func(_ *raw, m *Manifest) { m.Files[0].Name = "a/../b" }, corrupt, "plain relative", false},
		{"absolute", func(_ *raw, m *Manifest) { m.Files[0].Name = "/etc/passwd" }, corrupt, "plain relative", false},
		{"empty part", func(_ *raw, m *Manifest) { m.Files[0].Name = "a//b" }, corrupt, "plain relative", false},
		{"backslash", func(_ *raw, m *Manifest) { m.Files[0].Name = `..\x` }, corrupt, "plain relative", false},
		{"NUL", func(_ *raw, m *Manifest) { m.Files[0].Name = "a\x00b" }, corrupt, "plain relative", false},
		{"hidden", func(_ *raw, m *Manifest) { m.Files[0].Name = ".staging-x/a" }, corrupt, "plain relative", false},
		{"manifest twice", func(_ *raw, m *Manifest) { m.Files[0].Name = ManifestName }, corrupt, "manifest", false},
		{"duplicate", func(_ *raw, m *Manifest) { m.Files = append(m.Files, m.Files[0]) }, corrupt, "twice", false},
		{"file as directory", func(_ *raw, m *Manifest) {
			f := m.Files[0]
			f.Name = "a/b"
			m.Files = append(m.Files, f)
		}, corrupt, "lies in a file", false},
		{"no files", func(_ *raw, m *Manifest) { m.Files = nil }, corrupt, "0 files", false},
		{"future version", func(_ *raw, m *Manifest) { m.Version = 2 }, incompatible, "version 2", false},
		{"no version", func(r *raw, _ *Manifest) { r.manifest = `{}` }, incompatible, "version 0", false},
		{"unknown field", func(r *raw, _ *Manifest) { r.manifest = `{"forkd_pack":1,"run":"rm"}` }, corrupt, "unknown field", false},
		{"no JSON", func(r *raw, _ *Manifest) { r.manifest = `forkd` }, corrupt, "manifest", false},
		{"negative size", func(_ *raw, m *Manifest) { m.Files[0].Size, m.Files[0].Stored = -1, -1 }, corrupt, "-1 bytes", false},
		{"more stored than size", func(_ *raw, m *Manifest) { m.Files[0].Stored = 6 }, corrupt, "6 are stored", false},
		{"huge", func(_ *raw, m *Manifest) { m.Files[0].Size, m.Files[0].Stored = 1<<40, 1<<40 }, exhausted, "more than", false},
		{"overflow", func(_ *raw, m *Manifest) {
			m.Files[0].Size, m.Files[0].Extents = 10, [][2]int64{{1<<63 - 1, 5}}
		}, corrupt, "part", false},
		{"overlap", func(_ *raw, m *Manifest) {
			m.Files[0].Size, m.Files[0].Extents = 10, [][2]int64{{0, 3}, {2, 2}}
		}, corrupt, "part", false},
		{"parts do not add up", func(_ *raw, m *Manifest) { m.Files[0].Extents = [][2]int64{{0, 3}} }, corrupt, "parts have 3", false},
		{"too much in all", func(_ *raw, m *Manifest) {
			for _, n := range []string{"b", "c", "d"} {
				m.Files = append(m.Files, File{Name: n, Size: 30 << 20, Stored: 30 << 20, SHA256: m.Files[0].SHA256})
			}
		}, exhausted, "there is room for", false},
		{"bad digest form", func(_ *raw, m *Manifest) { m.Files[0].SHA256 = "00" }, corrupt, "digest", false},
		{"wrong digest", func(_ *raw, m *Manifest) { m.Files[0].SHA256 = sum(nil) }, corrupt, "SHA-256", true},
		{"size lie", func(_ *raw, m *Manifest) { m.Files[0].Size, m.Files[0].Stored = 4, 4 }, corrupt, "in its place", false},
		{"other name", func(r *raw, _ *Manifest) { r.entries[0].Name = "b" }, corrupt, "in its place", false},
		{"symbolic link", func(r *raw, _ *Manifest) {
			r.entries[0], r.data[0] = tar.Header{Typeflag: tar.TypeSymlink, Name: "a", Linkname: "/etc/passwd"}, nil
		}, corrupt, "not a plain file", false},
		{"hard link", func(r *raw, _ *Manifest) {
			r.entries[0], r.data[0] = tar.Header{Typeflag: tar.TypeLink, Name: "a", Linkname: "/etc/passwd"}, nil
		}, corrupt, "not a plain file", false},
		{"directory", func(r *raw, _ *Manifest) {
			r.entries[0], r.data[0] = tar.Header{Typeflag: tar.TypeDir, Name: "a/"}, nil
		}, corrupt, "not a plain file", false},
		{"device", func(r *raw, _ *Manifest) {
			r.entries[0], r.data[0] = tar.Header{Typeflag: tar.TypeChar, Name: "a"}, nil
		}, corrupt, "not a plain file", false},
		{"missing", func(r *raw, _ *Manifest) { r.entries = nil }, corrupt, "ends before", false},
		{"extra", func(r *raw, _ *Manifest) {
			r.entries = append(r.entries, tar.Header{Typeflag: tar.TypeReg, Name: "z", Size: 5})
			r.data = append(r.data, r.data[0])
		}, corrupt, "not listed", true},
		{"tail", func(r *raw, _ *Manifest) { r.tail = make([]byte, 1) }, corrupt, "longer than it says", true},
		{"bomb behind the end", func(r *raw, _ *Manifest) { r.tail = make([]byte, 50<<20) }, corrupt, "longer than it says", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, m := honest()
			c.spoil(&r, m)
			files, err := unpacked(t.Context(), r.bytes(t), limits)
			if errdefs.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v (%s), want %s with %q", err, errdefs.Code(err), c.code, c.text)
			}
			if (len(files) > 0) != c.begun {
				t.Errorf("%d files were begun", len(files))
			}
		})
	}
	r, _ := honest()
	if _, err := unpacked(t.Context(), r.bytes(t), limits); err != nil {
		t.Errorf("the honest one: %v", err)
	}
}

// TestBombs: what decompresses to more than is allowed ends early.
func TestBombs(t *testing.T) {
	zeros := func(n int64) []byte {
		var out bytes.Buffer
		z, _ := zstd.NewWriter(&out)
		if _, err := io.CopyN(z, zeroReader{}, n); err != nil {
			t.Fatal(err)
		}
		_ = z.Close()
		return out.Bytes()
	}
	if _, err := unpacked(t.Context(), zeros(200<<20), limits); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("200 MiB of zeros: %v", err)
	}
	// A first entry that says to be a manifest of 1 TiB.
	var out bytes.Buffer
	z, _ := zstd.NewWriter(&out)
	w := tar.NewWriter(z)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: ManifestName, Size: 1 << 40}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(w, zeroReader{}, 100<<20); err != nil {
		t.Fatal(err)
	}
	_ = z.Close()
	if _, err := unpacked(t.Context(), out.Bytes(), limits); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("a manifest of 1 TiB: %v", err)
	}
	var wide bytes.Buffer
	z, _ = zstd.NewWriter(&wide, zstd.WithWindowSize(128<<20))
	if _, err := z.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	_ = z.Flush()
	_ = z.Close()
	if _, err := unpacked(t.Context(), wide.Bytes(), limits); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("a window of 128 MiB: %v", err)
	}
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestTruncated: a pack that was cut anywhere is refused, and so is one with a
// changed byte.
func TestTruncated(t *testing.T) {
	whole := packed(t, map[string][]byte{"a": []byte("hello"), "b": bytes.Repeat([]byte("x1"), 3000)})
	for n := range whole {
		if _, err := unpacked(t.Context(), whole[:n], limits); !errors.Is(err, errdefs.ErrCorrupt) {
			t.Fatalf("cut at %d of %d: %v", n, len(whole), err)
		}
		b := bytes.Clone(whole)
		b[n] ^= 0x10
		if files, err := unpacked(t.Context(), b, limits); err == nil && string(files["a"].b) != "hello" {
			t.Fatalf("byte %d of %d changed: no error", n, len(whole))
		}
	}
	if _, err := unpacked(t.Context(), append(bytes.Clone(whole), "more"...), limits); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("with text behind: %v", err)
	}
}

// TestFailuresAreNotDamage: a source or target that fails is not the pack's fault.
func TestFailuresAreNotDamage(t *testing.T) {
	whole := packed(t, samples())
	broken := errors.New("the connection broke")
	r, err := Open(io.MultiReader(bytes.NewReader(whole[:len(whole)/2]), failing{broken}), limits)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	err = r.Extract(t.Context(), func(File) (Target, error) { return nil, nil })
	if !errors.Is(err, broken) || errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("with a source that fails: %v", err)
	}
	full := errdefs.New(errdefs.ErrResourceExhausted, "no space")
	r, err = Open(bytes.NewReader(whole), limits)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	err = r.Extract(t.Context(), func(File) (Target, error) { return nil, full })
	if !errors.Is(err, full) || errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("with a target that fails: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := unpacked(ctx, whole, limits); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	// A file that changes between its description and its writing.
	files := samples()
	m := describe(t, files)
	files["b"][7] ^= 1
	if err := Write(t.Context(), io.Discard, m, open(files)); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("a file that changed: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func FuzzReader(f *testing.F) {
	f.Add(packed(f, map[string][]byte{"a": []byte("hello"), "b/c": make([]byte, 100<<10)}))
	r, _ := honest()
	f.Add(r.bytes(f))
	f.Fuzz(func(t *testing.T, b []byte) {
		files, err := unpacked(t.Context(), b, Limits{MaxBytes: 1 << 20, MaxSize: 1 << 20})
		if err != nil {
			return
		}
		for name := range files {
			if CheckName(name) != nil {
				t.Errorf("file %q was accepted", name)
			}
		}
	})
}

// FuzzManifest feeds what is behind the compression, which the fuzzer cannot get past.
func FuzzManifest(f *testing.F) {
	_, m := honest()
	b, _ := json.Marshal(m)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decode(b)
		if err != nil {
			return
		}
		for _, file := range m.Files {
			var sum int64
			for _, e := range file.extents() {
				if e[0] < 0 || e[1] < 0 || e[0]+e[1] > file.Size {
					t.Fatalf("part %v of %d bytes", e, file.Size)
				}
				sum += e[1]
			}
			if sum != file.Stored {
				t.Fatalf("%d of %d bytes", sum, file.Stored)
			}
		}
	})
}

// TestGolden reads a pack that the first release of version 1 wrote.
func TestGolden(t *testing.T) {
	const path = "testdata/v1.forkd"
	files := map[string][]byte{"a": []byte("hello\n"), "b/sparse": append(make([]byte, 128<<10), "end"...)}
	if *update {
		if err := os.WriteFile(path, packed(t, files), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := unpacked(t.Context(), raw, limits)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		if b := got[name]; b == nil || !bytes.Equal(b.b, want) {
			t.Errorf("file %s differs", name)
		}
	}
}

var update = flag.Bool("update", false, "write the golden file")
