package memory

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDrop: a dropped page is no longer private, holds what the file below it holds, and can be written again.
func TestDrop(t *testing.T) {
	fd, err := unix.MemfdCreate("drop", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.Pwrite(fd, bytes.Repeat([]byte{7}, 16*PageSize), 0); err != nil {
		t.Fatal(err)
	}
	src, err := NewSource(fd)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Bytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Restore(Plan{{Page: 0, Count: 16, Source: &src}}); err != nil {
		t.Fatal(err)
	}
	for _, page := range []Address{3, 4, 100} {
		if err := s.WriteAt(bytes.Repeat([]byte{9}, PageSize), page*PageSize); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Drop(4*PageSize, 2*PageSize); err != nil {
		t.Fatal(err)
	}
	if err := s.Drop(100*PageSize, PageSize); err != nil {
		t.Fatal(err)
	}
	private, err := s.Private()
	if err != nil {
		t.Fatal(err)
	}
	if len(private) != 1 || private[0] != (Run{Page: 3, Count: 1}) {
		t.Errorf("private pages %v", private)
	}
	for page, want := range map[Address]byte{3: 9, 4: 7, 5: 7, 100: 0} {
		b, err := s.Slice(page*PageSize, PageSize)
		if err != nil || b[17] != want {
			t.Errorf("page %d holds %d, want %d (%v)", page, b[17], want, err)
		}
	}
	if err := s.WriteAt([]byte{1}, 4*PageSize); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []struct {
		a Address
		n uint64
	}{{1, PageSize}, {0, 17}, {1 << 20, PageSize}, {^Address(0) - 4095, 2 * PageSize}} {
		if s.Drop(bad.a, bad.n) == nil {
			t.Errorf("drop of %#x+%d was accepted", uint64(bad.a), bad.n)
		}
	}
}
