package vmmwire

import (
	"encoding/binary"

	"forkd.dev/forkd/internal/errdefs"
)

type encoder struct{ b []byte }

func (e *encoder) uint(tag, v uint64) {
	if v != 0 {
		e.b = binary.AppendUvarint(e.b, tag<<1)
		e.b = binary.AppendUvarint(e.b, v)
	}
}

func (e *encoder) flag(tag uint64, v bool) {
	if v {
		e.uint(tag, 1)
	}
}

// entry writes b also if it is empty: an item of a list.
func (e *encoder) entry(tag uint64, b []byte) {
	e.b = binary.AppendUvarint(e.b, tag<<1|1)
	e.b = binary.AppendUvarint(e.b, uint64(len(b)))
	e.b = append(e.b, b...)
}

func (e *encoder) bytes(tag uint64, b []byte) {
	if len(b) != 0 {
		e.entry(tag, b)
	}
}

// decoder walks over fields. After the loop over next, err says what was wrong.
type decoder struct {
	b    []byte
	tag  uint64
	num  uint64
	data []byte
	err  error
}

func (d *decoder) next() bool {
	if d.err != nil || len(d.b) == 0 {
		return false
	}
	key := d.uvarint()
	d.num, d.data, d.tag = d.uvarint(), nil, key>>1
	if d.err != nil {
		return false
	}
	if key&1 == 0 {
		return true
	}
	if d.num > uint64(len(d.b)) {
		d.fail("field %d claims %d bytes of %d", d.tag, d.num, len(d.b))
		return false
	}
	d.data, d.b = d.b[:d.num:d.num], d.b[d.num:]
	return true
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.fail("bad number")
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = errdefs.New(errdefs.ErrInvalid, format, args...)
	}
}

// number returns the value of a number field that must not exceed limit.
func (d *decoder) number(limit uint64) uint64 {
	if d.num > limit || d.data != nil {
		d.fail("field %d is %d, more than %d", d.tag, d.num, limit)
		return 0
	}
	return d.num
}

// text returns the value of a bytes field of at most limit bytes.
func (d *decoder) text(limit int) []byte {
	if len(d.data) > limit || (d.data == nil && d.num != 0) {
		d.fail("field %d has %d bytes, more than %d", d.tag, len(d.data), limit)
		return nil
	}
	return d.data
}
