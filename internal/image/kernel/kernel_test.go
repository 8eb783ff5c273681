package kernel

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/errdefs"
)

// bzImage wraps a payload as a kernel build does.
func bzImage(payload []byte) []byte {
	const sectors = 2
	const offset = 100
	b := make([]byte, (sectors+1)*sectorSize+offset, (sectors+1)*sectorSize+offset+len(payload)+50)
	b[offSetupSects] = sectors
	copy(b[offMagic:], "HdrS")
	binary.LittleEndian.PutUint16(b[offVersion:], 0x20f)
	binary.LittleEndian.PutUint32(b[offPayloadOffset:], offset)
	binary.LittleEndian.PutUint32(b[offPayloadLength:], uint32(len(payload)))
	return append(append(b, payload...), make([]byte, 50)...)
}

func fakeELF() []byte {
	return append([]byte("\x7fELF"), bytes.Repeat([]byte("kernel text "), 5000)...)
}

// lz4Frame packs data as literals and one long overlapping match of its last byte.
func lz4Frame(data []byte) []byte {
	var block []byte
	for len(data) > 0 {
		n := min(len(data), 200)
		block = append(block, 15<<4, byte(n-15))
		block = append(block, data[:n]...)
		data = data[n:]
		if len(data) > 0 {
			block = append(block, 1, 0) // a match of 4 from distance 1
			data = data[4:]
		}
	}
	out := append([]byte{}, lz4Magic...)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(block)))
	return append(out, block...)
}

func TestVmlinuxOfEveryFormat(t *testing.T) {
	t.Parallel()
	elf := fakeELF()
	size := binary.LittleEndian.AppendUint32(nil, uint32(len(elf)))
	payloads := map[string][]byte{"gzip": gzipped(t, elf), "none": elf}

	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	payloads["zstd"] = append(enc.EncodeAll(elf, nil), size...)

	xz := exec.Command("xz", "--x86", "--lzma2", "--check=crc32", "-c")
	xz.Stdin = bytes.NewReader(elf)
	packed, err := xz.Output()
	if err != nil {
		t.Fatalf("run xz (part of every Debian): %v", err)
	}
	payloads["xz with x86 filter"] = append(packed, size...)

	for name, p := range payloads {
		got, err := Vmlinux(context.Background(), bzImage(p))
		if err != nil || !bytes.Equal(got, elf) {
			t.Errorf("%s: %d bytes, %v; want %d bytes", name, len(got), err, len(elf))
		}
	}
}

func gzipped(t *testing.T, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestVmlinuxOfLZ4(t *testing.T) {
	t.Parallel()
	// Runs of four equal bytes at each 204th place, so that matches can stand for them.
	elf := append([]byte("\x7fELF"), bytes.Repeat([]byte("a"), 4000)...)
	got, err := Vmlinux(context.Background(), bzImage(append(lz4Frame(elf), 0, 0, 0, 0)))
	if err != nil || !bytes.Equal(got, elf) {
		t.Fatalf("%d bytes, %v; want %d bytes", len(got), err, len(elf))
	}
}

func TestBadImages(t *testing.T) {
	t.Parallel()
	good := bzImage(gzipped(t, fakeELF()))
	change := func(f func(b []byte)) []byte {
		b := bytes.Clone(good)
		f(b)
		return b
	}
	cases := map[string][]byte{
		"empty":        nil,
		"short":        good[:0x24f],
		"no magic":     change(func(b []byte) { b[offMagic] = 'X' }),
		"old protocol": change(func(b []byte) { b[offVersion], b[offVersion+1] = 7, 2 }),
		"far payload":  change(func(b []byte) { binary.LittleEndian.PutUint32(b[offPayloadOffset:], 1<<32-1) }),
		"long payload": change(func(b []byte) { binary.LittleEndian.PutUint32(b[offPayloadLength:], 1<<32-1) }),
		"no payload":   change(func(b []byte) { binary.LittleEndian.PutUint32(b[offPayloadLength:], 0) }),
		"cut payload":  change(func(b []byte) { binary.LittleEndian.PutUint32(b[offPayloadLength:], 40) }),
		"no ELF":       bzImage(gzipped(t, []byte("not a kernel"))),
		"bad lz4":      bzImage(append(bytes.Clone(lz4Magic), 255, 255, 255, 255, 0, 0, 0, 0)),
		"bad xz":       bzImage(append(bytes.Clone(xzMagic), make([]byte, 100)...)),
	}
	for name, image := range cases {
		if _, err := Vmlinux(context.Background(), image); !errors.Is(err, errdefs.ErrCorrupt) {
			t.Errorf("%s: %v, want ErrCorrupt", name, err)
		}
	}
	if _, err := Vmlinux(context.Background(), bzImage([]byte("BZh91AY&SY123"))); !errors.Is(err, errdefs.ErrUnsupported) {
		t.Errorf("unknown compression: %v, want ErrUnsupported", err)
	}
}

func TestDecompressStopsAtLimit(t *testing.T) {
	t.Parallel()
	big := bytes.Repeat([]byte{0}, 1<<20)
	xz := exec.Command("xz", "-c")
	xz.Stdin = bytes.NewReader(big)
	packed, err := xz.Output()
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string][]byte{"gzip": gzipped(t, big), "xz": packed, "lz4": lz4Frame(big)} {
		if _, err := Decompress(context.Background(), p, 1000); !errors.Is(err, errdefs.ErrCorrupt) {
			t.Errorf("%s: %v, want ErrCorrupt", name, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Decompress(ctx, packed, 2<<20); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// module makes the smallest ELF file that has a .modinfo section.
func module(info ...string) []byte {
	const names = "\x00.modinfo\x00.shstrtab\x00"
	text := strings.Join(info, "\x00") + "\x00"
	const headerLen, sectionLen = 64, 64
	b := make([]byte, headerLen)
	copy(b, "\x7fELF\x02\x01\x01")
	le := binary.LittleEndian
	le.PutUint16(b[16:], 1)  // relocatable
	le.PutUint16(b[18:], 62) // x86-64
	le.PutUint32(b[20:], 1)
	b = append(append(b, text...), names...)
	le.PutUint64(b[40:], uint64(len(b))) // section table
	le.PutUint16(b[52:], headerLen)
	le.PutUint16(b[58:], sectionLen)
	le.PutUint16(b[60:], 3)
	le.PutUint16(b[62:], 2)
	section := func(name, kind uint32, off, size int) {
		s := make([]byte, sectionLen)
		le.PutUint32(s, name)
		le.PutUint32(s[4:], kind)
		le.PutUint64(s[24:], uint64(off))
		le.PutUint64(s[32:], uint64(size))
		b = append(b, s...)
	}
	section(0, 0, 0, 0)
	section(1, 1, headerLen, len(text))
	section(10, 3, headerLen+len(text), len(names))
	return b
}

func order(t *testing.T, fsys fstest.MapFS, wishes ...Wish) (string, error) {
	t.Helper()
	r, err := newResolver(fsys)
	if err != nil {
		return "", err
	}
	for _, w := range wishes {
		if err := r.add(context.Background(), w.Name, w.Optional); err != nil {
			return "", err
		}
	}
	var names []string
	for _, m := range r.order {
		names = append(names, m.Name)
	}
	return strings.Join(names, " "), nil
}

func TestModuleOrder(t *testing.T) {
	t.Parallel()
	file := func(data []byte) *fstest.MapFile { return &fstest.MapFile{Data: data} }
	tree := fstest.MapFS{
		"modules.builtin":         file([]byte("kernel/fs/ext4/ext4.ko\nkernel/drivers/char/hw_random/rng-core.ko\n")),
		"kernel/v/virtio.ko":      file(module("name=virtio", "depends=virtio_ring")),
		"kernel/v/virtio_ring.ko": file(module("depends=")),
		"kernel/h/virtio-rng.ko":  file(module("depends=virtio,rng_core")),
		"kernel/z/packed.ko.gz":   file(gzipped(t, module("depends=virtio-rng", "softdep=pre: absent virtio_ring post: later"))),
		"kernel/z/loop_a.ko":      file(module("depends=loop_b")),
		"kernel/z/loop_b.ko":      file(module("depends=loop_a")),
		"kernel/z/needy.ko":       file(module("depends=nowhere")),
		"kernel/z/broken.ko":      file([]byte("text")),
		"kernel/z/notes.ko.txt":   file([]byte("text")),
	}
	got, err := order(t, tree, Wish{Name: "packed"}, Wish{Name: "virtio"}, Wish{Name: "ext4"}, Wish{Name: "gone", Optional: true})
	if want := "virtio_ring virtio virtio-rng packed"; err != nil || got != want {
		t.Errorf("order %q, %v; want %q", got, err, want)
	}
	for name, class := range map[string]error{
		"gone": errdefs.ErrUnsupported, "notes": errdefs.ErrUnsupported, "needy": errdefs.ErrUnsupported,
		"loop_a": errdefs.ErrCorrupt, "broken": errdefs.ErrCorrupt,
	} {
		if _, err := order(t, tree, Wish{Name: name}); !errors.Is(err, class) {
			t.Errorf("%s: %v, want %v", name, err, class)
		}
	}
	if _, err := order(t, fstest.MapFS{}); !errors.Is(err, errdefs.ErrCorrupt) {
		t.Errorf("tree without modules.builtin: %v, want ErrCorrupt", err)
	}
}

func FuzzPayload(f *testing.F) {
	f.Add(bzImage([]byte("payload")))
	f.Add([]byte("HdrS"))
	f.Fuzz(func(t *testing.T, image []byte) {
		p, err := Payload(image)
		if err == nil && !bytes.Contains(image, p) {
			t.Fatal("payload does not lie in the image")
		}
	})
}

func FuzzLZ4(f *testing.F) {
	f.Add(lz4Frame(fakeELF())[4:], 1<<20)
	f.Add([]byte{4, 0, 0, 0, 0x10, 'a', 1, 0}, 100)
	f.Fuzz(func(t *testing.T, p []byte, limit int) {
		limit = min(max(limit, 0), 1<<20)
		out, err := unlz4(p, limit)
		if err == nil && len(out) > limit {
			t.Fatalf("%d bytes, limit %d", len(out), limit)
		}
	})
}

func FuzzModinfo(f *testing.F) {
	f.Add(module("depends=a,b", "softdep=pre: c"))
	f.Fuzz(func(_ *testing.T, b []byte) {
		info, err := readModinfo(b)
		_ = fmt.Sprint(info, err)
	})
}
