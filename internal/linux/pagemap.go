package linux

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// PageSize is the page size of the only architecture forkd runs on.
const PageSize = 4096

// Bits of a /proc/PID/pagemap entry (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagemapFile    = 1 << 61 // file page or shared anonymous
	pagemapSwapped = 1 << 62
	pagemapPresent = 1 << 63
)

// Mapping is one line of /proc/PID/maps.
type Mapping struct {
	Start, End uint64
	Perms      string // e.g. "rw-p"
	Offset     uint64
	Path       string
}

// Mappings lists the memory mappings of pid.
func Mappings(pid int) ([]Mapping, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, fmt.Errorf("read mappings of process %d: %w", pid, err)
	}
	defer f.Close()
	var out []Mapping
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		m, err := parseMapping(sc.Text())
		if err != nil {
			return nil, fmt.Errorf("read mappings of process %d: %w", pid, err)
		}
		out = append(out, m)
	}
	return out, sc.Err()
}

func parseMapping(line string) (Mapping, error) {
	fields := strings.SplitN(line, " ", 6)
	if len(fields) < 5 {
		return Mapping{}, fmt.Errorf("malformed line %q", line)
	}
	lo, hi, ok := strings.Cut(fields[0], "-")
	if !ok {
		return Mapping{}, fmt.Errorf("malformed range in %q", line)
	}
	start, err1 := strconv.ParseUint(lo, 16, 64)
	end, err2 := strconv.ParseUint(hi, 16, 64)
	off, err3 := strconv.ParseUint(fields[2], 16, 64)
	if err1 != nil || err2 != nil || err3 != nil {
		return Mapping{}, fmt.Errorf("malformed numbers in %q", line)
	}
	m := Mapping{Start: start, End: end, Perms: fields[1], Offset: off}
	if len(fields) == 6 {
		m.Path = strings.TrimSpace(fields[5])
	}
	return m, nil
}

// PrivatePages reports which pages of the private mapping m of pid are no longer
// those of its backing file: the process (or its guest) wrote them. It returns
// runs of page numbers relative to m.Start, ascending.
func PrivatePages(pid int, m Mapping) ([]PageRun, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		return nil, fmt.Errorf("open page map of process %d: %w", pid, err)
	}
	defer f.Close()
	pages := (m.End - m.Start) / PageSize
	buf := make([]byte, 64<<10) // 32 MiB of address space a read
	var runs []PageRun
	for page := uint64(0); page < pages; {
		want := min(uint64(len(buf)), (pages-page)*8)
		n, err := f.ReadAt(buf[:want], int64((m.Start/PageSize+page)*8))
		if n < 8 {
			return nil, fmt.Errorf("read page map of process %d: %w", pid, err)
		}
		for i := 0; i+8 <= n; i += 8 {
			entry := binary.LittleEndian.Uint64(buf[i:])
			if entry&(pagemapPresent|pagemapSwapped) != 0 && entry&pagemapFile == 0 {
				runs = appendPage(runs, page)
			}
			page++
		}
	}
	return runs, nil
}

// PageRun is Count pages from Start on.
type PageRun struct{ Start, Count uint64 }

func appendPage(runs []PageRun, page uint64) []PageRun {
	if n := len(runs); n > 0 && runs[n-1].Start+runs[n-1].Count == page {
		runs[n-1].Count++
		return runs
	}
	return append(runs, PageRun{Start: page, Count: 1})
}

// CountPages sums the pages of runs.
func CountPages(runs []PageRun) uint64 {
	var n uint64
	for _, r := range runs {
		n += r.Count
	}
	return n
}
