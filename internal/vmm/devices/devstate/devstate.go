// Package devstate encodes the state of devices: little-endian numbers and byte
// strings one after the other, preceded by a version. There are no tags; a change of
// what is stored is a new version. Checksums, total length and the names of devices
// belong to the file that embeds the state.
//
// Encoding appends with encoding/binary and [AppendBytes]. Decoding goes through a
// [Decoder], which never reads beyond its input, never allocates more than that, and
// remembers its first error, so that callers check once at the end.
package devstate

import (
	"encoding/binary"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
)

// AppendBytes appends the length of p and p.
func AppendBytes(b, p []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(p)))
	return append(b, p...)
}

// AppendBool appends one byte.
func AppendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

// Decoder takes state apart. After an error all values are zero.
type Decoder struct {
	b    []byte
	what string
	err  error
}

// NewDecoder decodes b, the state of what; version is the one this build writes and
// reads. Another one is errdefs.ErrIncompatible.
func NewDecoder(b []byte, what string, version uint16) *Decoder {
	d := &Decoder{b: b, what: what}
	if v := d.Uint16(); d.err == nil && v != version {
		d.err = errdefs.New(errdefs.ErrIncompatible, "state of %s has version %d, this build reads %d", what, v, version)
	}
	return d
}

func (d *Decoder) take(n int) []byte {
	if d.err == nil && n > len(d.b) {
		d.Fail("is too short")
	}
	if d.err != nil {
		return nil
	}
	p := d.b[:n]
	d.b = d.b[n:]
	return p
}

// Uint8 returns the next byte.
func (d *Decoder) Uint8() uint8 {
	if p := d.take(1); p != nil {
		return p[0]
	}
	return 0
}

// Bool returns the next byte, which must be 0 or 1.
func (d *Decoder) Bool() bool {
	v := d.Uint8()
	if v > 1 {
		d.Fail("has a truth value of %d", v)
	}
	return v == 1
}

// Uint16 returns the next two bytes.
func (d *Decoder) Uint16() uint16 {
	if p := d.take(2); p != nil {
		return binary.LittleEndian.Uint16(p)
	}
	return 0
}

// Uint32 returns the next four bytes.
func (d *Decoder) Uint32() uint32 {
	if p := d.take(4); p != nil {
		return binary.LittleEndian.Uint32(p)
	}
	return 0
}

// Uint64 returns the next eight bytes.
func (d *Decoder) Uint64() uint64 {
	if p := d.take(8); p != nil {
		return binary.LittleEndian.Uint64(p)
	}
	return 0
}

// Bytes returns the next byte string, part of the input, of at most limit bytes.
func (d *Decoder) Bytes(limit int) []byte {
	n := d.Uint32()
	if d.err == nil && uint64(n) > uint64(limit) {
		d.Fail("has %d bytes where at most %d are allowed", n, limit)
	}
	if d.err != nil {
		return nil
	}
	return d.take(int(n))
}

// Fail records that the content is wrong, unless something was before.
func (d *Decoder) Fail(format string, args ...any) {
	if d.err == nil {
		d.err = errdefs.New(errdefs.ErrCorrupt, "state of %s %s", d.what, fmt.Sprintf(format, args...))
	}
}

// Err returns what was wrong so far.
func (d *Decoder) Err() error { return d.err }

// Close returns what was wrong; bytes that are left are wrong too.
func (d *Decoder) Close() error {
	if len(d.b) > 0 {
		d.Fail("has %d bytes too many", len(d.b))
	}
	return d.err
}
