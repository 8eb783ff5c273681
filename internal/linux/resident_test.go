package linux

import (
	"errors"
	"os"
	"testing"

	"forkd.dev/forkd/internal/errdefs"
)

func TestReadPrivateKiB(t *testing.T) {
	before, err := ReadPrivateKiB(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	const mib = 32
	block := make([]byte, mib<<20)
	for i := 0; i < len(block); i += 4096 {
		block[i] = 1
	}
	after, err := ReadPrivateKiB(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if grown := after - before; grown < mib*1024*9/10 {
		t.Errorf("%d MiB were written, but private memory grew by %d KiB", mib, grown)
	}
	if block[0] != 1 {
		t.Error("the block is gone")
	}
	if _, err := ReadPrivateKiB(1 << 30); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("memory of no process: %v", err)
	}
}

func TestParseStatm(t *testing.T) {
	r, s, err := parseStatm([]byte("100 50 20 1 0 2 0\n"))
	if err != nil || r != 50 || s != 20 {
		t.Errorf("got %d, %d, %v", r, s, err)
	}
	for _, bad := range []string{"", "1 2", "1 x 3", "1 2 y"} {
		if _, _, err := parseStatm([]byte(bad)); !errors.Is(err, errdefs.ErrUnsupported) {
			t.Errorf("statm %q: %v", bad, err)
		}
	}
}
