package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// lz4Block is the unpacked size of every block of a legacy frame but the last.
const lz4Block = 8 << 20

var errLZ4 = errors.New("lz4 block is damaged")

// unlz4 unpacks the blocks of a legacy lz4 frame, each preceded by its length.
func unlz4(p []byte, limit int) ([]byte, error) {
	var out []byte
	for len(p) > 0 {
		if len(p) < 4 {
			return nil, fmt.Errorf("read lz4 frame: %d bytes after the last block", len(p))
		}
		n := uint64(binary.LittleEndian.Uint32(p))
		p = p[4:]
		if n > uint64(len(p)) {
			return nil, fmt.Errorf("read lz4 frame: a block of %d bytes with %d left", n, len(p))
		}
		room := min(limit-len(out), lz4Block)
		var err error
		if out, err = unlz4Block(out, p[:n], room); err != nil {
			return nil, fmt.Errorf("read lz4 frame: %w", err)
		}
		p = p[n:]
	}
	return out, nil
}

// unlz4Block appends the content of one block, at most room bytes. Blocks of a
// legacy frame do not refer to earlier ones.
func unlz4Block(out, p []byte, room int) ([]byte, error) {
	base := len(out)
	for len(p) > 0 {
		token := p[0]
		literals, rest, err := lz4Length(p[1:], int(token>>4))
		if err != nil {
			return nil, err
		}
		if literals > len(rest) || len(out)-base+literals > room {
			return nil, errLZ4
		}
		out = append(out, rest[:literals]...)
		p = rest[literals:]
		if len(p) == 0 {
			return out, nil // the last sequence has no match
		}
		if len(p) < 2 {
			return nil, errLZ4
		}
		distance := int(binary.LittleEndian.Uint16(p))
		length, rest, err := lz4Length(p[2:], int(token&15))
		if err != nil {
			return nil, err
		}
		length += 4
		if distance == 0 || distance > len(out)-base || len(out)-base+length > room {
			return nil, errLZ4
		}
		out = appendMatch(out, distance, length)
		p = rest
	}
	return out, nil
}

// appendMatch repeats length bytes from distance back; the two may overlap, which
// repeats a pattern.
func appendMatch(out []byte, distance, length int) []byte {
	for length > 0 {
		n := min(distance, length)
		from := len(out) - distance
		out = append(out, out[from:from+n]...)
		length -= n
	}
	return out
}

// lz4Length reads the continuation of a length whose first four bits were nibble.
func lz4Length(p []byte, nibble int) (int, []byte, error) {
	n := nibble
	if nibble < 15 {
		return n, p, nil
	}
	for i, b := range p {
		n += int(b)
		if n > lz4Block {
			return 0, nil, errLZ4
		}
		if b != 255 {
			return n, p[i+1:], nil
		}
	}
	return 0, nil, errLZ4
}
