// Package kernel takes a Linux kernel package apart: the ELF kernel out of a
// bzImage, and the modules a guest needs in an order in which they load.
//
// Its input comes from a signed package, yet nothing is trusted: offsets are
// checked, sizes are bounded, and damage is ErrCorrupt.
package kernel

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os/exec"

	"github.com/klauspost/compress/zstd"

	"forkd.dev/forkd/internal/errdefs"
)

// MaxVmlinux bounds the ELF kernel; Debian's have 50 to 90 MiB.
const MaxVmlinux = 512 << 20

// Offsets in the setup header (Linux, Documentation/arch/x86/boot.rst).
const (
	offSetupSects    = 0x1f1
	offMagic         = 0x202
	offVersion       = 0x206
	offPayloadOffset = 0x248
	offPayloadLength = 0x24c
	setupHeaderEnd   = 0x250

	sectorSize = 512
	// minVersion is the first boot protocol with the payload fields.
	minVersion = 0x208
	// sizeTrailer is what the kernel's build appends to a payload whose format does
	// not hold its unpacked size (all but gzip).
	sizeTrailer = 4
)

// Payload returns the compressed kernel inside a bzImage.
func Payload(image []byte) ([]byte, error) {
	bad := func(format string, args ...any) error {
		return errdefs.New(errdefs.ErrCorrupt, "read bzImage of %d bytes: %s", len(image), fmt.Sprintf(format, args...))
	}
	if len(image) < setupHeaderEnd {
		return nil, bad("no room for a setup header")
	}
	if string(image[offMagic:offMagic+4]) != "HdrS" {
		return nil, bad("no setup header")
	}
	if v := binary.LittleEndian.Uint16(image[offVersion:]); v < minVersion {
		return nil, bad("boot protocol %#x is older than %#x", v, minVersion)
	}
	sectors := uint64(image[offSetupSects])
	if sectors == 0 {
		sectors = 4 // the documented meaning of zero
	}
	start := (sectors+1)*sectorSize + uint64(binary.LittleEndian.Uint32(image[offPayloadOffset:]))
	length := uint64(binary.LittleEndian.Uint32(image[offPayloadLength:]))
	if length == 0 || start+length > uint64(len(image)) {
		return nil, bad("payload %d+%d does not lie inside", start, length)
	}
	return image[start : start+length], nil
}

// Vmlinux returns the ELF kernel inside a bzImage. A payload in xz format is
// unpacked by the xz program, because kernels use a filter that Go's readers lack.
func Vmlinux(ctx context.Context, image []byte) ([]byte, error) {
	payload, err := Payload(image)
	if err != nil {
		return nil, err
	}
	elf, err := unpackPayload(ctx, payload)
	if err != nil {
		return nil, fmt.Errorf("unpack kernel: %w", err)
	}
	if !bytes.HasPrefix(elf, []byte("\x7fELF")) {
		return nil, errdefs.New(errdefs.ErrCorrupt, "unpack kernel: %d bytes are no ELF file", len(elf))
	}
	return elf, nil
}

func unpackPayload(ctx context.Context, p []byte) ([]byte, error) {
	if bytes.HasPrefix(p, []byte("\x7fELF")) {
		return p, nil
	}
	if !bytes.HasPrefix(p, gzipMagic) && len(p) > sizeTrailer {
		p = p[:len(p)-sizeTrailer]
	}
	return Decompress(ctx, p, MaxVmlinux)
}

var (
	gzipMagic = []byte{0x1f, 0x8b}
	xzMagic   = []byte("\xfd7zXZ\x00")
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
	lz4Magic  = []byte{0x02, 0x21, 0x4c, 0x18} // the legacy frame
)

// Decompress unpacks p, told by its magic to be gzip, xz, zstd or legacy lz4,
// into at most limit bytes.
func Decompress(ctx context.Context, p []byte, limit int) ([]byte, error) {
	var out []byte
	var err error
	switch {
	case bytes.HasPrefix(p, gzipMagic):
		out, err = gunzip(p, limit)
	case bytes.HasPrefix(p, zstdMagic):
		out, err = unzstd(p, limit)
	case bytes.HasPrefix(p, lz4Magic):
		out, err = unlz4(p[len(lz4Magic):], limit)
	case bytes.HasPrefix(p, xzMagic):
		return unxz(ctx, p, limit)
	default:
		return nil, errdefs.New(errdefs.ErrUnsupported, "compression with magic %x is unknown", p[:min(len(p), 6)])
	}
	return out, errdefs.As(errdefs.ErrCorrupt, err)
}

func gunzip(p []byte, limit int) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(p))
	if err != nil {
		return nil, fmt.Errorf("read gzip: %w", err)
	}
	r.Multistream(false)
	return readLimited(r, limit)
}

func unzstd(p []byte, limit int) ([]byte, error) {
	r, err := zstd.NewReader(bytes.NewReader(p), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(MaxVmlinux))
	if err != nil {
		return nil, fmt.Errorf("read zstd: %w", err)
	}
	defer r.Close()
	return readLimited(r, limit)
}

func unxz(ctx context.Context, p []byte, limit int) ([]byte, error) {
	// One stream only: what follows it is no part of it.
	cmd := exec.CommandContext(ctx, "xz", "--decompress", "--stdout", "--single-stream", "--memlimit=256MiB")
	cmd.Stdin = bytes.NewReader(p)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("run xz: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, errdefs.WithHint(errdefs.New(errdefs.ErrUnavailable, "run xz: %w", err), "apt-get install xz-utils")
	}
	out, readErr := readLimited(pipe, limit)
	pipe.Close() // a longer output must not block xz
	waitErr := cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("run xz: %w", ctx.Err())
	case readErr != nil:
		return nil, errdefs.As(errdefs.ErrCorrupt, readErr)
	case waitErr != nil:
		return nil, errdefs.New(errdefs.ErrCorrupt, "run xz: %w: %.200s", waitErr, stderr.String())
	}
	return out, nil
}

func readLimited(r io.Reader, limit int) ([]byte, error) {
	out, err := io.ReadAll(io.LimitReader(r, int64(limit)+1))
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	if len(out) > limit {
		return nil, fmt.Errorf("decompress: more than %d bytes", limit)
	}
	return out, nil
}
