package agentwire

import (
	"encoding/binary"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// A message is a list of fields. A field is a key, uvarint(tag<<1 | kind), and
// a value: kind 0 is one uvarint (signed values in zigzag form), kind 1 is a
// length and that many bytes. Unknown tags are skipped; a field of zero value is
// left out. There is no reflection here because the first use of a reflective
// codec costs tens of milliseconds in an emulated guest.

type encoder struct{ b []byte }

func (e *encoder) uint(tag uint64, v uint64) {
	if v != 0 {
		e.b = binary.AppendUvarint(e.b, tag<<1)
		e.b = binary.AppendUvarint(e.b, v)
	}
}

func (e *encoder) int(tag uint64, v int64) { e.uint(tag, uint64(v<<1)^uint64(v>>63)) }

func (e *encoder) flag(tag uint64, v bool) {
	if v {
		e.uint(tag, 1)
	}
}

func (e *encoder) bytes(tag uint64, v []byte) {
	if len(v) != 0 {
		e.entry(tag, v)
	}
}

// entry is bytes, also if empty: an item of a list.
func (e *encoder) entry(tag uint64, v []byte) {
	e.b = binary.AppendUvarint(e.b, tag<<1|1)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)))
	e.b = append(e.b, v...)
}

func (e *encoder) str(tag uint64, v string) {
	if v != "" {
		e.strEntry(tag, v)
	}
}

func (e *encoder) strEntry(tag uint64, v string) {
	e.b = binary.AppendUvarint(e.b, tag<<1|1)
	e.b = binary.AppendUvarint(e.b, uint64(len(v)))
	e.b = append(e.b, v...)
}

func (e *encoder) time(tag uint64, t time.Time) {
	if !t.IsZero() {
		e.int(tag, t.UnixNano())
	}
}

func (e *encoder) stringMap(tag uint64, m map[string]string) {
	for k, v := range m {
		var pair encoder
		pair.str(1, k)
		pair.str(2, v)
		e.entry(tag, pair.b)
	}
}

// maxEntries bounds lists and maps: an empty entry takes two bytes on the wire
// and far more in memory.
const maxEntries = 16 << 10

type decoder struct {
	b     []byte
	tag   uint64
	num   uint64
	data  []byte
	isNum bool
	count int
	err   error
}

// next moves to the next field; false at the end or at an error.
func (d *decoder) next() bool {
	if d.err != nil || len(d.b) == 0 {
		return false
	}
	key, ok := d.uvarint()
	if !ok {
		return false
	}
	d.tag, d.isNum = key>>1, key&1 == 0
	d.num, ok = d.uvarint()
	if !ok {
		return false
	}
	d.data = nil
	if d.isNum {
		return true
	}
	if d.num > uint64(len(d.b)) {
		return d.fail("field %d of %d bytes in %d", d.tag, d.num, len(d.b))
	}
	d.data, d.b = d.b[:d.num:d.num], d.b[d.num:]
	return true
}

func (d *decoder) uvarint() (uint64, bool) {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		return 0, d.fail("bad number")
	}
	d.b = d.b[n:]
	return v, true
}

func (d *decoder) fail(format string, args ...any) bool {
	if d.err == nil {
		d.err = errdefs.New(errdefs.ErrCorrupt, "message: "+format, args...)
	}
	return false
}

func (d *decoder) uint() uint64 {
	if !d.isNum {
		d.fail("field %d is not a number", d.tag)
		return 0
	}
	return d.num
}

func (d *decoder) int() int64 {
	v := d.uint()
	return int64(v>>1) ^ -int64(v&1)
}

// small returns a number that must fit 31 bits and not be negative.
func (d *decoder) small() int {
	v := d.int()
	if v < 0 || v > 1<<31-1 {
		d.fail("field %d out of range", d.tag)
		return 0
	}
	return int(v)
}

func (d *decoder) signed() int {
	v := d.int()
	if v < -1<<31 || v > 1<<31-1 {
		d.fail("field %d out of range", d.tag)
		return 0
	}
	return int(v)
}

func (d *decoder) flag() bool { return d.uint() != 0 }

// bytes returns a part of the message, not a copy.
func (d *decoder) bytes() []byte {
	if d.isNum {
		d.fail("field %d is not bytes", d.tag)
		return nil
	}
	return d.data
}

func (d *decoder) str() string { return string(d.bytes()) }

func (d *decoder) duration() time.Duration { return time.Duration(d.int()) }

func (d *decoder) time() time.Time { return time.Unix(0, d.int()) }

// item counts an entry of a list or map; false if there are too many.
func (d *decoder) item() bool {
	d.count++
	if d.count > maxEntries {
		return d.fail("more than %d entries", maxEntries)
	}
	return true
}

func (d *decoder) appendStr(list []string) []string {
	if !d.item() {
		return list
	}
	return append(list, d.str())
}

func (d *decoder) putPair(m map[string]string) map[string]string {
	if !d.item() {
		return m
	}
	var k, v string
	pair := decoder{b: d.bytes()}
	for pair.next() {
		switch pair.tag {
		case 1:
			k = pair.str()
		case 2:
			v = pair.str()
		}
	}
	if pair.err != nil {
		d.err = pair.err
		return m
	}
	if m == nil {
		m = make(map[string]string)
	}
	m[k] = v
	return m
}
