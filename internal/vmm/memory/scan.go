package memory

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// Run is Count pages from Page on.
type Run struct{ Page, Count uint64 }

// End is the first page after r.
func (r Run) End() uint64 { return r.Page + r.Count }

// Count sums the pages of runs.
func Count(runs []Run) (n uint64) {
	for _, r := range runs {
		n += r.Count
	}
	return n
}

// Private lists the pages that are this machine's own: the guest or a device wrote them,
// or they were copied from a layer. All others equal what is mapped, or are zero.
func (s *Space) Private() ([]Run, error) {
	if !s.noScan {
		runs, err := s.scan(scanArg{
			Mask: pageIsFile | pageIsPFNZero, Inverted: pageIsFile | pageIsPFNZero, AnyOf: pageIsPresent | pageIsSwapped,
		})
		if !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EINVAL) {
			return runs, err
		}
		s.noScan = true // older than Linux 6.7
	}
	return s.readPagemap()
}

// scan walks over the whole memory. The kernel's walk_end may be stale although the whole
// range was walked, so that it counts only if the vector was filled.
func (s *Space) scan(arg scanArg) ([]Run, error) {
	base := address(s.mem)
	arg.Size, arg.Start, arg.End = scanArgLen, base, base+s.size
	out := make([]region, regionsPerScan)
	var runs []Run
	for {
		n, err := scan(int(s.pagemap.Fd()), &arg, out)
		if err != nil {
			return nil, fmt.Errorf("scan guest memory: %w", err)
		}
		for _, r := range out[:n] {
			runs = appendRun(runs, (r.Start-base)/PageSize, (r.End-base)/PageSize)
		}
		if n < len(out) || arg.WalkEnd <= arg.Start || arg.WalkEnd >= arg.End {
			return runs, nil
		}
		arg.Start = arg.WalkEnd
	}
}

// appendRun adds pages [from, to), without those that are there already.
func appendRun(runs []Run, from, to uint64) []Run {
	if n := len(runs); n > 0 {
		last := &runs[n-1]
		if from <= last.End() {
			last.Count = max(last.End(), to) - last.Page
			return runs
		}
	}
	return append(runs, Run{from, to - from})
}

// Bits of an entry of /proc/PID/pagemap.
const (
	pagemapFile    = 1 << 61
	pagemapSwapped = 1 << 62
	pagemapPresent = 1 << 63
)

// readPagemap is Private for kernels before 6.7. It also reports pages of zeros that were
// only read: one cannot see the difference there.
func (s *Space) readPagemap() ([]Run, error) {
	buf := make([]byte, 64<<10)
	var runs []Run
	first, pages := address(s.mem)/PageSize, s.size/PageSize
	for page := uint64(0); page < pages; {
		n, err := s.pagemap.ReadAt(buf[:min(uint64(len(buf)), (pages-page)*8)], int64((first+page)*8))
		if n < 8 {
			return nil, fmt.Errorf("read page map: %w", err)
		}
		for i := 0; i+8 <= n; i += 8 {
			entry := binary.LittleEndian.Uint64(buf[i:])
			if entry&(pagemapPresent|pagemapSwapped) != 0 && entry&pagemapFile == 0 {
				runs = appendRun(runs, page, page+1)
			}
			page++
		}
	}
	return runs, nil
}

// tracker knows which private pages were written since it last looked.
type tracker struct{ fd int }

func (t *tracker) close() { _ = unix.Close(t.fd) }

// StartTracking begins to record writes, by the kernel's asynchronous write protection:
// nobody handles faults, a guest pays a few microseconds for the first write to a page
// after each look. Every private page counts as written until the first look. It may
// be repeated. ErrUnsupported: the kernel is older than 6.7, and Private is all there is.
func (s *Space) StartTracking() error {
	if s.track != nil {
		return nil
	}
	fd, err := openTracking()
	if err != nil {
		return fmt.Errorf("track writes of the guest: %w", errdefs.As(errdefs.ErrUnsupported, err))
	}
	if err := registerTracking(fd, s.mem); err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("track writes of the guest: %w", errdefs.As(errdefs.ErrUnsupported, err))
	}
	s.track = &tracker{fd}
	return nil
}

// Tracking tells whether writes are tracked.
func (s *Space) Tracking() bool { return s.track != nil }

// Written lists the private pages written since the last call, and protects them again.
func (s *Space) Written() ([]Run, error) {
	if s.track == nil {
		return nil, errdefs.New(errdefs.ErrNotReady, "writes of the guest are not tracked")
	}
	return s.scan(scanArg{
		Flags: scanProtect,
		Mask:  pageIsFile | pageIsPFNZero | pageIsWritten, Inverted: pageIsFile | pageIsPFNZero, AnyOf: pageIsPresent | pageIsSwapped,
	})
}
