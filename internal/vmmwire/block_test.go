package vmmwire

import "testing"

func TestBlockArgs(t *testing.T) {
	if n, err := ParseBlockArgs(BlockArgs(262144)); n != 262144 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	for _, b := range [][]byte{nil, {1}, BlockArgs(0), BlockArgs(1<<30 + 1), make([]byte, 9)} {
		if _, err := ParseBlockArgs(b); err == nil {
			t.Errorf("%x is accepted", b)
		}
	}
}
