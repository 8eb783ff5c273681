package vmmwire

import (
	"encoding/binary"

	"forkd.dev/forkd/internal/errdefs"
)

// The files of a block device: the raw image, which may be shorter than the disk, then
// sealed cow1 layers, the lowest first, all open for reading; last an empty file open
// for reading and writing that becomes the machine's own overlay. In a CaptureEnd there is
// only that last one.

// BlockArgs are the Args of a block device with a disk of that many blocks of 4096 bytes.
func BlockArgs(blocks uint64) []byte { return binary.LittleEndian.AppendUint64(nil, blocks) }

// ParseBlockArgs returns the number of blocks. ErrInvalid: args are not those of a block device.
func ParseBlockArgs(args []byte) (blocks uint64, err error) {
	const most = 1 << 30 // cow1.MaxBlocks
	if len(args) == 8 {
		blocks = binary.LittleEndian.Uint64(args)
	}
	if blocks == 0 || blocks > most {
		return 0, errdefs.New(errdefs.ErrInvalid, "arguments of a block device: %d bytes, disk of %d blocks", len(args), blocks)
	}
	return blocks, nil
}
