package memory

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

const testPages = 2048

func space(t testing.TB, pages uint64) *Space {
	t.Helper()
	s, err := New(Config{Bytes: pages * PageSize})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// source makes a file of pages, each filled with its number and the mark.
func source(t testing.TB, pages uint64, mark byte) *Source {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	for i := range pages {
		if _, err := unix.Pwrite(fd, content(i, mark), int64(i*PageSize)); err != nil {
			t.Fatal(err)
		}
	}
	s, err := NewSource(fd)
	if err != nil {
		t.Fatal(err)
	}
	return &s
}

func content(i uint64, mark byte) []byte {
	b := bytes.Repeat([]byte{mark}, PageSize)
	b[0], b[1] = byte(i), byte(i>>8)
	return b
}

func (s *Space) page(i uint64) []byte { return s.mem[i*PageSize : (i+1)*PageSize] }

// check compares the memory with a plan.
func check(t *testing.T, s *Space, plan Plan, mark map[*Source]byte) {
	t.Helper()
	want := make([]byte, s.size)
	for _, r := range plan {
		for i := uint64(0); i < r.Count && r.Source != nil; i++ {
			copy(want[(r.Page+i)*PageSize:], content(r.Offset/PageSize+i, mark[r.Source]))
		}
	}
	for i := range s.size / PageSize {
		if !bytes.Equal(s.page(i), want[i*PageSize:(i+1)*PageSize]) {
			t.Fatalf("page %d differs", i)
		}
	}
}

func TestAddresses(t *testing.T) {
	s := &Space{mem: make([]byte, 64), size: 64}
	for _, c := range []struct {
		a  Address
		n  uint64
		ok bool
	}{
		{0, 64, true}, {63, 1, true}, {64, 0, true}, {0, 0, true},
		{0, 65, false}, {64, 1, false}, {1, ^uint64(0), false}, {^Address(0), 1, false}, {^Address(0), 2, false}, {HighStart, 1, false}, {LowEnd, 1, false},
	} {
		b, err := s.Slice(c.a, c.n)
		if (err == nil) != c.ok || (c.ok && uint64(len(b)) != c.n) {
			t.Errorf("%#x+%d: %d bytes, %v", c.a, c.n, len(b), err)
		}
		if err != nil && !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%v", err)
		}
	}
	// 4 GiB: the last one lies above the hole, and nothing spans it.
	big := space(t, 4<<30/PageSize)
	for _, c := range []struct {
		a  Address
		n  uint64
		ok bool
	}{
		{LowEnd - 1, 1, true}, {LowEnd - 1, 2, false}, {HighStart, 1 << 30, true}, {HighStart, 1<<30 + 1, false},
		{HighStart - 1, 2, false}, {HighStart + 1<<30 - 1, 1, true}, {LowEnd, 1, false}, {MMIOStart, 4, false},
	} {
		if _, err := big.Slice(c.a, c.n); (err == nil) != c.ok {
			t.Errorf("%#x+%d: %v", c.a, c.n, err)
		}
	}
	if err := big.WriteAt([]byte("high"), HighStart); err != nil || string(big.mem[3<<30:3<<30+4]) != "high" {
		t.Errorf("write above the hole: %v", err)
	}
	if slots := big.Slots(); len(slots) != 2 || slots[1].Address != HighStart || len(slots[1].Memory) != 1<<30 {
		t.Errorf("%d slots", len(slots))
	}
}

// TestRandomPlans restores random plans, writes random pages, and rolls back to random other
// plans by both ways; the content is always exactly the plan's, and Private names what was written.
func TestRandomPlans(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	a, b := source(t, testPages, 'a'), source(t, testPages, 'b')
	mark := map[*Source]byte{a: 'a', b: 'b'}
	plan := func() (p Plan) {
		for page := uint64(0); page < testPages; {
			n := min(1+rnd.Uint64N(60), testPages-page)
			r := Range{Page: page, Count: n}
			if k := rnd.IntN(3); k > 0 {
				r.Source, r.Offset = []*Source{nil, a, b}[k], rnd.Uint64N(testPages-n+1)*PageSize
			}
			if rnd.IntN(4) > 0 { // else a gap: zero
				p = append(p, r)
			}
			page += n
		}
		return p
	}
	for range 20 {
		s := space(t, testPages)
		p := plan()
		if err := s.Restore(p); err != nil {
			t.Fatal(err)
		}
		check(t, s, p, mark)
		track := rnd.IntN(2) == 0
		if track {
			if err := s.StartTracking(); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Written(); err != nil {
				t.Fatal(err)
			}
		}
		for range 5 {
			var pages []uint64
			for range rnd.IntN(200) {
				i := rnd.Uint64N(testPages)
				s.page(i)[rnd.IntN(PageSize)]++
				pages = append(pages, i)
			}
			slices.Sort(pages)
			private, err := s.Private()
			if err != nil {
				t.Fatal(err)
			}
			contains(t, "private", private, pages)
			if track {
				written, err := s.Written()
				if err != nil {
					t.Fatal(err)
				}
				contains(t, "written", written, pages)
				if n := Count(written); n != uint64(len(slices.Compact(pages))) {
					t.Errorf("%d pages were written, tracking says %d", len(slices.Compact(pages)), n)
				}
			}
			if rnd.IntN(2) == 0 {
				p = plan()
			}
			if err := s.rollback(p, Union(private, s.Differs(p)), rnd.IntN(2) == 0); err != nil {
				t.Fatal(err)
			}
			check(t, s, p, mark)
			if track {
				if _, err := s.Written(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	// The files are as they were.
	for src, m := range mark {
		got := make([]byte, PageSize)
		for i := range uint64(testPages) {
			if _, err := unix.Pread(src.FD, got, int64(i*PageSize)); err != nil || !bytes.Equal(got, content(i, m)) {
				t.Fatalf("page %d of file %c changed: %v", i, m, err)
			}
		}
	}
}

func contains(t *testing.T, what string, runs []Run, pages []uint64) {
	t.Helper()
	for _, p := range pages {
		if !slices.ContainsFunc(runs, func(r Run) bool { return r.Page <= p && p < r.End() }) {
			t.Fatalf("page %d is not in the %s pages", p, what)
		}
	}
}

// TestScansAgree: PAGEMAP_SCAN and reading the page map say the same, over more regions than one
// call returns.
func TestScansAgree(t *testing.T) {
	const pages = 4 * regionsPerScan
	s := space(t, pages)
	if err := s.Restore(Plan{{Page: 0, Count: pages / 2, Source: source(t, pages/2, 'x')}}); err != nil {
		t.Fatal(err)
	}
	for i := uint64(0); i < pages; i += 2 {
		s.page(i)[0] = 1
	}
	for i := uint64(1); i < pages/2; i += 6 {
		_ = s.page(i)[1] // reading a file page does not make it private
	}
	fast, err := s.Private()
	if err != nil {
		t.Fatal(err)
	}
	slow, err := s.readPagemap()
	if err != nil {
		t.Fatal(err)
	}
	if len(fast) != pages/2 || !slices.Equal(fast, slow) {
		t.Errorf("%d runs by scan, %d by reading, want %d", len(fast), len(slow), pages/2)
	}
	s.noScan = true
	if again, err := s.Private(); err != nil || !slices.Equal(again, fast) {
		t.Errorf("without PAGEMAP_SCAN: %d runs, %v", len(again), err)
	}
}

func TestPlansThatDoNotFit(t *testing.T) {
	src := source(t, 16, 'x')
	for name, p := range map[string]Plan{
		"beyond memory":   {{Page: testPages - 1, Count: 2}},
		"wraps":           {{Page: 1, Count: ^uint64(0)}},
		"empty":           {{Page: 1}},
		"overlap":         {{Page: 1, Count: 2}, {Page: 2, Count: 2}},
		"beyond the file": {{Page: 0, Count: 8, Source: src, Offset: 9 * PageSize}},
		"offset":          {{Page: 0, Count: 1, Source: src, Offset: 5}},
		"offset wraps":    {{Page: 0, Count: 1, Source: src, Offset: ^uint64(PageSize - 1)}},
	} {
		if err := space(t, testPages).Restore(p); !errors.Is(err, errdefs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, n := range []uint64{0, 1, PageSize + 1, 1 << 60} {
		if _, err := New(Config{Bytes: n}); err == nil {
			t.Errorf("memory of %d bytes is made", n)
		}
	}
	if _, err := NewSource(0); err == nil {
		t.Log("standard input is a file here")
	}
}

// TestWriter: pages land in their slots, whatever the order.
func TestWriter(t *testing.T) {
	const pages = 5000
	s := space(t, pages)
	fd, err := unix.MemfdCreate("out", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for i := range uint64(pages) {
		copy(s.page(i), content(i, 'w'))
	}
	w := NewWriter(s, fd)
	order := rand.New(rand.NewPCG(3, 4)).Perm(pages)
	for slot, page := range order {
		if err := w.Add(Run{uint64(page), 1}, uint64(slot)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Add(Run{0, pages}, pages); err != nil { // more than one call takes
		t.Fatal(err)
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, PageSize)
	for slot := range uint64(2 * pages) {
		want := slot - pages
		if slot < pages {
			want = uint64(order[slot])
		}
		if _, err := unix.Pread(fd, got, int64(slot*PageSize)); err != nil || !bytes.Equal(got, content(want, 'w')) {
			t.Fatalf("slot %d: %v", slot, err)
		}
	}
}
