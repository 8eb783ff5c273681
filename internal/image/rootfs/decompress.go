package rootfs

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// maxWindow bounds the memory that a compressed archive may ask for.
const maxWindow = 128 << 20

// decompress looks at the first bytes of r. done frees what reading needed.
func decompress(r *bufio.Reader) (plain io.Reader, done func(), err error) {
	none := func() {}
	start, _ := r.Peek(6) // an archive that is shorter is none
	switch {
	case bytes.HasPrefix(start, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(r)
		return z, none, err
	case bytes.HasPrefix(start, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxWindow), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, none, err
		}
		return z, z.Close, nil
	case bytes.HasPrefix(start, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		z, err := xz.ReaderConfig{DictCap: maxWindow, SingleStream: true}.NewReader(r)
		return z, none, err
	}
	return r, none, nil
}
