package cow1

import "math/bits"

// bitmap is a set of slots. It grows with the largest member.
type bitmap struct {
	words []uint64
	count uint64
	hint  int // no member is in a word before
}

func newBitmap(n uint64) *bitmap { return &bitmap{words: make([]uint64, (n+63)/64)} }

// set adds i and tells whether it was not there.
func (m *bitmap) set(i uint64) bool {
	w := int(i / 64)
	for w >= len(m.words) {
		m.words = append(m.words, 0)
	}
	if m.words[w]&(1<<(i%64)) != 0 {
		return false
	}
	m.words[w] |= 1 << (i % 64)
	m.count++
	m.hint = min(m.hint, w)
	return true
}

// take removes and returns the smallest member.
func (m *bitmap) take() (uint64, bool) {
	if m.count == 0 {
		return 0, false
	}
	for m.words[m.hint] == 0 {
		m.hint++
	}
	b := bits.TrailingZeros64(m.words[m.hint])
	m.words[m.hint] &^= 1 << b
	m.count--
	return uint64(m.hint*64 + b), true
}

// absorb moves all members of o to m.
func (m *bitmap) absorb(o *bitmap) {
	for w, word := range o.words {
		if word == 0 {
			continue
		}
		for w >= len(m.words) {
			m.words = append(m.words, 0)
		}
		m.count += uint64(bits.OnesCount64(word &^ m.words[w]))
		m.words[w] |= word
		m.hint = min(m.hint, w)
		o.words[w] = 0
	}
	o.count, o.hint = 0, 0
}
