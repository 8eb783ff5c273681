package memory

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// MapPages is the least length of a run that is mapped from its file; shorter ones are
// copied. A mapping costs about as much as copying one or two pages, but each also makes
// every later change of the address space dearer.
const MapPages = 8

// Space is the memory of one machine.
type Space struct {
	mem     []byte // the whole mapping
	size    uint64 // bytes, a multiple of PageSize
	pagemap *os.File

	// mapped is what lies under the private pages: ascending, adjacent ranges of
	// files; between them, anonymous memory. Set while nobody uses the memory.
	mapped []mappedRange
	track  *tracker // nil until StartTracking
	noScan bool     // the kernel has no PAGEMAP_SCAN
}

// Config says what memory to make.
type Config struct {
	Bytes uint64
	// Huge asks for huge pages where the memory is anonymous.
	Huge bool
	// Pagemap is what OpenPagemap returned, which the Space owns from then on; nil: open it.
	Pagemap *os.File
}

// OpenPagemap opens what Private and Written read, for a process that gives up the right to.
func OpenPagemap() (*os.File, error) {
	f, err := os.OpenFile("/proc/self/pagemap", os.O_RDONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open page map: %w", err)
	}
	return f, nil
}

// New makes zeroed memory. It costs no host memory until it is touched.
func New(c Config) (*Space, error) {
	if c.Bytes == 0 || c.Bytes%PageSize != 0 || c.Bytes > 1<<46 {
		return nil, errdefs.New(errdefs.ErrInvalid, "make guest memory of %d bytes", c.Bytes)
	}
	pagemap := c.Pagemap
	if pagemap == nil {
		var err error
		if pagemap, err = OpenPagemap(); err != nil {
			return nil, fmt.Errorf("make guest memory: %w", err)
		}
	}
	mem, err := mapAnonymous(c.Bytes)
	if err != nil {
		pagemap.Close()
		return nil, fmt.Errorf("map guest memory of %d bytes: %w", c.Bytes, errdefs.As(errdefs.ErrResourceExhausted, err))
	}
	s := &Space{mem: mem, size: c.Bytes, pagemap: pagemap}
	_ = unix.Madvise(mem, unix.MADV_DONTDUMP)
	if c.Huge {
		if err := unix.Madvise(mem, unix.MADV_HUGEPAGE); err != nil {
			s.Close()
			return nil, fmt.Errorf("ask for huge pages: %w", err)
		}
	}
	return s, nil
}

// Close unmaps the memory. The VM that uses it is gone by then.
func (s *Space) Close() {
	if s.track != nil {
		s.track.close()
	}
	unmap(s.mem)
	s.mem, s.size = nil, 0
	s.pagemap.Close()
}

// Size returns the bytes of memory.
func (s *Space) Size() uint64 { return s.size }

// Slot is a piece of memory as the VM is told of it.
type Slot struct {
	Address Address
	Memory  []byte
}

// Slots lists the pieces of memory by their guest addresses: one, or two if there is
// more than fits below LowEnd.
func (s *Space) Slots() []Slot {
	low := min(s.size, uint64(LowEnd))
	slots := []Slot{{0, s.mem[:low:low]}}
	if low < s.size {
		slots = append(slots, Slot{HighStart, s.mem[low:s.size:s.size]})
	}
	return slots
}

// Source is a file that holds pages. Its content must not change any more: a memory
// file sealed for ever, or one that nobody can write.
type Source struct {
	FD int
	id fileID
}

type fileID struct{ dev, ino uint64 }

// NewSource describes an open file. The descriptor stays the caller's and is used only
// during the call it is passed to.
func NewSource(fd int) (Source, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Source{}, fmt.Errorf("stat a source of guest memory: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return Source{}, errdefs.New(errdefs.ErrInvalid, "a source of guest memory is no regular file")
	}
	return Source{FD: fd, id: fileID{st.Dev, st.Ino}}, nil
}

// Range is a run of pages and where their content lies.
type Range struct {
	Page, Count uint64
	Source      *Source // nil: zero
	Offset      uint64  // in the source, a multiple of PageSize
}

// End is the first page after r.
func (r Range) End() uint64 { return r.Page + r.Count }

// Plan is the content of a whole memory: ascending ranges that do not overlap; what is
// in none is zero.
type Plan []Range

// check makes sure that the plan fits and that no range ends beyond its file: a page
// there would kill the process when the guest touches it.
func (p Plan) check(pages uint64) error {
	end := uint64(0)
	sizes := map[*Source]uint64{}
	for _, r := range p {
		if r.Count == 0 || r.Page < end || r.Page > pages || r.Count > pages-r.Page {
			return errdefs.New(errdefs.ErrInvalid, "plan of memory: %d pages at %d after %d, of %d", r.Count, r.Page, end, pages)
		}
		end = r.End()
		if r.Source == nil {
			continue
		}
		size, ok := sizes[r.Source]
		if !ok {
			var st unix.Stat_t
			if err := unix.Fstat(r.Source.FD, &st); err != nil {
				return fmt.Errorf("plan of memory: stat source: %w", err)
			}
			size = uint64(st.Size)
			sizes[r.Source] = size
		}
		if r.Offset%PageSize != 0 || r.Offset > size || r.Count*PageSize > size-r.Offset {
			return errdefs.New(errdefs.ErrInvalid, "plan of memory: %d pages at offset %d of a file of %d bytes", r.Count, r.Offset, size)
		}
	}
	return nil
}

type mappedRange struct {
	page, count uint64
	file        fileID
	offset      uint64
}

// Restore fills fresh memory (of New, never touched) by plan. After an error the space
// can only be closed.
func (s *Space) Restore(plan Plan) error {
	if err := plan.check(s.size / PageSize); err != nil {
		return err
	}
	for _, r := range plan {
		if r.Source == nil {
			continue
		}
		at := s.mem[r.Page*PageSize : r.End()*PageSize]
		if r.Count < MapPages {
			if err := readFull(r.Source.FD, at, r.Offset); err != nil {
				return fmt.Errorf("copy guest memory: %w", err)
			}
			continue
		}
		if err := mapFile(at, r.Source.FD, r.Offset); err != nil {
			return fmt.Errorf("map %d pages of guest memory: %w", r.Count, err)
		}
		s.mapped = append(s.mapped, mappedRange{r.Page, r.Count, r.Source.id, r.Offset})
	}
	return nil
}

// readFull fills p from a file that is known to be long enough.
func readFull(fd int, p []byte, offset uint64) error {
	for len(p) > 0 {
		n, err := unix.Pread(fd, p, int64(offset))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return errdefs.New(errdefs.ErrCorrupt, "file ends at %d", offset)
		}
		p, offset = p[n:], offset+uint64(n)
	}
	return nil
}
