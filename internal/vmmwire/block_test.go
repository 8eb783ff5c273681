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

func TestNetArgs(t *testing.T) {
	mac := [6]byte{0x52, 0x54, 0, 1, 2, 3}
	if m, err := ParseNetArgs(NetArgs(mac)); m != mac || err != nil {
		t.Errorf("% x, %v", m, err)
	}
	if _, err := ParseNetArgs([]byte{1, 2}); err == nil {
		t.Error("two bytes are accepted")
	}
}
