package image

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

var update = flag.Bool("update", false, "rewrite golden files")

func goldenImage() Image {
	return Image{
		ID: "im" + strings.Repeat("a1", 10), Name: "python", Source: "debian:bookworm", Suite: "bookworm",
		Packages: []string{"python3", "python3-numpy"}, DiskMiB: 4096, Bytes: 246415360,
		Digest: "sparse-sha256:" + strings.Repeat("0f", 32), KernelDigest: strings.Repeat("ab", 32),
		KernelRelease: "6.1.0-57-cloud-amd64", CreatedAt: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), Builtin: true,
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs:\n%s\nwant:\n%s", name, got, want)
	}
}

func TestGoldenManifests(t *testing.T) {
	t.Parallel()
	img := goldenImage()
	data, err := encodeImage(img)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "image-1.json", data)
	if got, err := decodeImage(data); err != nil || !reflect.DeepEqual(got, img) {
		t.Errorf("decoded %+v, %v", got, err)
	}
	part := KernelPart{File: "vmlinux", SHA256: strings.Repeat("01", 32)}
	k := Kernel{
		Release: "6.1.0-57-cloud-amd64", Package: "linux-image-6.1.0-57-cloud-amd64", Version: "6.1.192-3", Vmlinux: part,
		Modules: []KernelPart{{"modules/00-virtio_ring.ko", strings.Repeat("02", 32)}}, CreatedAt: img.CreatedAt,
	}
	k.Digest = digestParts(k.parts())
	if data, err = seal(kernelFormat, k); err != nil {
		t.Fatal(err)
	}
	golden(t, "kernel-1.json", data)
	if data, err = seal(namesFormat, map[string]string{"python": img.ID}); err != nil {
		t.Fatal(err)
	}
	golden(t, "names-1.json", data)
}

func TestDamagedManifests(t *testing.T) {
	t.Parallel()
	data, err := encodeImage(goldenImage())
	if err != nil {
		t.Fatal(err)
	}
	replace := func(old, with string) []byte { return bytes.Replace(data, []byte(old), []byte(with), 1) }
	for name, c := range map[string]struct {
		data  []byte
		class error
	}{
		"empty":         {nil, errdefs.ErrCorrupt},
		"cut":           {data[:len(data)/2], errdefs.ErrCorrupt},
		"changed":       {replace("4096", "8192"), errdefs.ErrCorrupt},
		"checksum":      {replace(`"sha256": "`, `"sha256": "0`), errdefs.ErrCorrupt},
		"later version": {replace(`"format": 1`, `"format": 2`), errdefs.ErrIncompatible},
		"large":         {bytes.Repeat([]byte(" "), maxManifest+1), errdefs.ErrCorrupt},
	} {
		if _, err := decodeImage(c.data); !errors.Is(err, c.class) {
			t.Errorf("%s: %v, want %v", name, err, c.class)
		}
	}
	for name, change := range map[string]func(*Image){
		"id": func(i *Image) { i.ID = "sb" + i.ID[2:] }, "name": func(i *Image) { i.Name = "../x" },
		"kernel": func(i *Image) { i.KernelDigest = "../../etc" }, "disk": func(i *Image) { i.DiskMiB = -1 },
	} {
		img := goldenImage()
		change(&img)
		data, err := encodeImage(img)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeImage(data); !errors.Is(err, errdefs.ErrCorrupt) {
			t.Errorf("bad %s: %v, want ErrCorrupt", name, err)
		}
	}
}

func FuzzImageManifest(f *testing.F) {
	data, err := encodeImage(goldenImage())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte(`{"format":1,"sha256":"","body":{}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		img, err := decodeImage(data)
		if err != nil {
			if c := errdefs.Class(err); c != errdefs.ErrCorrupt && c != errdefs.ErrIncompatible {
				t.Fatalf("class %v of %v", c, err)
			}
			return
		}
		if again, err := encodeImage(img); err != nil {
			t.Fatalf("encode %+v: %v", img, err)
		} else if back, err := decodeImage(again); err != nil || back.ID != img.ID {
			t.Fatalf("decode again: %+v, %v", back, err)
		}
	})
}

// TestDigestIsOfContent compares files with and without holes.
func TestDigestIsOfContent(t *testing.T) {
	t.Parallel()
	const size = 3*digestBlock + 1000
	content := make([]byte, size)
	copy(content[digestBlock+100:], "data")
	content[size-1] = 1
	dense, sparse := filepath.Join(t.TempDir(), "dense"), filepath.Join(t.TempDir(), "sparse")
	if err := os.WriteFile(dense, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := createSparse(sparse, size); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(sparse, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err1 := f.WriteAt([]byte("data"), digestBlock+100)
	_, err2 := f.WriteAt([]byte{1}, size-1)
	if err := errors.Join(err1, err2, f.Close()); err != nil {
		t.Fatal(err)
	}
	digest := func(path string) string {
		d, err := DigestDisk(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	want := digest(dense)
	if got := digest(sparse); got != want {
		t.Errorf("sparse %s, dense %s", got, want)
	}
	if err := os.Truncate(sparse, size+1); err != nil {
		t.Fatal(err)
	}
	if digest(sparse) == want {
		t.Error("a longer file has the same digest")
	}
	content[0] = 1
	if err := os.WriteFile(dense, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if digest(dense) == want {
		t.Error("a changed file has the same digest")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := DigestDisk(ctx, dense); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}
