package agentwire

import "bytes"

// cobsBlock is the most data one code byte covers.
const cobsBlock = 254

// cobsEncoder writes COBS onto buf: the result holds no NUL. The zero value with
// a buf is not ready; use newCOBS.
type cobsEncoder struct {
	buf  []byte
	mark int // index of the code byte of the open block
}

func newCOBS(dst []byte) cobsEncoder {
	return cobsEncoder{buf: append(dst, 0), mark: len(dst)}
}

func (c *cobsEncoder) write(p []byte) {
	for len(p) > 0 {
		n := min(len(p), cobsBlock-(len(c.buf)-c.mark-1))
		if zero := bytes.IndexByte(p[:n], 0); zero >= 0 {
			c.buf = append(c.buf, p[:zero]...)
			p = p[zero+1:]
			c.next()
			continue
		}
		c.buf = append(c.buf, p[:n]...)
		p = p[n:]
		if len(c.buf)-c.mark-1 == cobsBlock {
			c.next()
		}
	}
}

// next closes the open block and opens one.
func (c *cobsEncoder) next() {
	c.buf[c.mark] = byte(len(c.buf) - c.mark)
	c.mark = len(c.buf)
	c.buf = append(c.buf, 0)
}

// finish closes the last block and returns the encoded bytes.
func (c *cobsEncoder) finish() []byte {
	c.buf[c.mark] = byte(len(c.buf) - c.mark)
	return c.buf
}

// decodeCOBS decodes b in place. It reports whether b is well-formed.
func decodeCOBS(b []byte) ([]byte, bool) {
	out := b[:0]
	for i := 0; i < len(b); {
		code := int(b[i])
		end := i + code
		if code == 0 || end > len(b) {
			return nil, false
		}
		// What is written stays behind what is read: a block of code bytes yields
		// at most code bytes.
		out = append(out, b[i+1:end]...)
		i = end
		if code != cobsBlock+1 && i < len(b) {
			out = append(out, 0)
		}
	}
	return out, true
}
