package machine

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/memory"
	"forkd.dev/forkd/internal/vmm/vmstate"
	"forkd.dev/forkd/internal/vmmwire"
)

// When a capture copies while the guest runs, and for how long.
const (
	// Below so many pages it is quicker to copy all in the pause than to track writes,
	// which makes the guest fault on each page once more.
	smallCapture = 4096
	// Rounds end when so few pages are left that the pause hardly feels them, when a round
	// does not leave fewer than three quarters of the one before, or after maxRounds.
	fewPages  = 512
	maxRounds = 5
)

// Capture says where a capture goes. CaptureBegin owns the descriptors.
type Capture struct {
	Pages, Index int
	MaxPages     uint64
	// Everything stores all pages there are, not only what differs from the parent.
	Everything bool
	NoCopy     bool // begin without copying
}

// capture is one under way.
type capture struct {
	Capture
	slots   slotTable
	left    []memory.Run // known to be needed, not copied since they were written
	rounds  uint64
	tracked bool
}

// CaptureBegin copies memory while the guest runs, if there is enough to make that
// worth it. It returns how many rounds that took.
func (m *Machine) CaptureBegin(c Capture) (rounds uint64, err error) {
	p := &capture{Capture: c}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if !m.filled || m.capture != nil || m.hasEnded() {
		return 0, errdefs.New(errdefs.ErrConflict, "begin capture: the machine is blank, has ended, or is being captured")
	}
	if err := m.beginTracking(p); err != nil {
		return 0, fmt.Errorf("begin capture: %w", err)
	}
	if p.tracked && !c.NoCopy && m.running {
		if err := m.preCopy(p); err != nil {
			return 0, fmt.Errorf("begin capture: %w", err)
		}
	}
	m.capture = p
	return p.rounds, nil
}

func (p *capture) close() {
	_ = unix.Close(p.Pages)
	_ = unix.Close(p.Index)
}

// beginTracking turns tracking on for a machine with much to copy.
func (m *Machine) beginTracking(p *capture) error {
	if m.mem.Tracking() {
		p.tracked = true
		return nil
	}
	if p.NoCopy || !m.running {
		return nil
	}
	private, err := m.mem.Private()
	if err != nil || memory.Count(private) <= smallCapture {
		return err
	}
	err = m.mem.StartTracking()
	if errors.Is(err, errdefs.ErrUnsupported) {
		return nil // all is copied in the pause
	}
	p.tracked = err == nil
	return err
}

// preCopy copies what was written until little is left. Each round protects the pages
// before it reads them.
func (m *Machine) preCopy(p *capture) error {
	last := uint64(0)
	for {
		written, err := m.mem.Written()
		if err != nil {
			return err
		}
		if p.rounds == 0 {
			written = memory.Union(written, m.sinceParent)
			if p.Everything {
				all, err := m.everything()
				if err != nil {
					return err
				}
				written = memory.Union(written, all)
			}
		}
		n := memory.Count(written)
		if p.rounds > 0 && (n <= fewPages || n*4 > last*3 || p.rounds >= maxRounds) {
			p.left = written
			m.sinceParent = memory.Union(m.sinceParent, written)
			return nil
		}
		if err := p.copy(m.mem, written); err != nil {
			return err
		}
		m.sinceParent = memory.Union(m.sinceParent, written)
		last = n
		p.rounds++
	}
}

// CaptureEnd pauses the machine, copies what is left, stores the state, calls frozen, and
// lets the machine run again if asked to. After an error the machine runs or not as before, and
// the capture is over.
func (m *Machine) CaptureEnd(stateFD int, resume bool, frozen func() error) (vmmwire.Captured, error) {
	p := m.capture
	if p == nil || m.hasEnded() {
		return vmmwire.Captured{}, errdefs.New(errdefs.ErrConflict, "end capture: none was begun, or the machine has ended")
	}
	m.capture = nil
	defer p.close()
	wasRunning := m.running
	start := time.Now()
	m.Pause()
	copied, state, err := m.captureStopped(p)
	if err == nil {
		err = frozen()
	}
	if (resume && err == nil) || (wasRunning && err != nil) {
		if resumeErr := m.Resume(); err == nil {
			err = resumeErr
		}
	}
	pause := time.Since(start)
	if err != nil {
		return vmmwire.Captured{}, fmt.Errorf("end capture: %w", err)
	}
	done := vmmwire.Captured{CopiedPages: copied, Rounds: p.rounds, Pause: pause}
	b, err := vmstate.Encode(state)
	if err == nil {
		done.StateBytes = uint64(len(b))
		err = writeFull(stateFD, b)
	}
	if err == nil {
		done.Pages, done.Runs, err = p.writeIndex()
	}
	if err != nil {
		return vmmwire.Captured{}, fmt.Errorf("end capture: %w", err)
	}
	return done, nil
}

// captureStopped does what has to happen in the pause.
func (m *Machine) captureStopped(p *capture) (copied uint64, s *vmstate.State, err error) {
	var pages []memory.Run
	switch {
	case p.tracked:
		if pages, err = m.mem.Written(); err != nil {
			return 0, nil, err
		}
		m.sinceParent = memory.Union(m.sinceParent, pages)
		if pages = memory.Union(pages, p.left); p.rounds == 0 {
			pages = memory.Union(pages, m.sinceParent)
		}
	default:
		if pages, err = m.mem.Private(); err != nil {
			return 0, nil, err
		}
	}
	if p.Everything && p.rounds == 0 {
		all, err := m.everything()
		if err != nil {
			return 0, nil, err
		}
		pages = memory.Union(pages, all)
	}
	if err := p.copy(m.mem, pages); err != nil {
		return 0, nil, err
	}
	s, err = m.saveState()
	return memory.Count(pages), s, err
}

// everything lists all pages that may not be zero.
func (m *Machine) everything() ([]memory.Run, error) {
	private, err := m.mem.Private()
	return memory.Union(private, m.mem.Mapped()), err
}

// CaptureAbort gives a capture up. It may be repeated.
func (m *Machine) CaptureAbort() {
	if m.capture != nil {
		m.capture.close()
		m.capture = nil
	}
}

// Stored says that the last capture was published: it is the parent of the next one.
// Precondition: the machine has not run a capture since that ended.
func (m *Machine) Stored() { m.sinceParent = nil }

// slotTable tells which page of the pages file holds a guest page.
type slotTable struct {
	chunks map[uint64][]uint32 // slot+1, by page
	used   uint64
}

const chunkPages = 1024

// slot returns the slot of a page, a new one if it has none.
func (t *slotTable) slot(page uint64) uint64 {
	if t.chunks == nil {
		t.chunks = map[uint64][]uint32{}
	}
	c := t.chunks[page/chunkPages]
	if c == nil {
		c = make([]uint32, chunkPages)
		t.chunks[page/chunkPages] = c
	}
	s := &c[page%chunkPages]
	if *s == 0 {
		t.used++
		*s = uint32(t.used)
	}
	return uint64(*s) - 1
}

// runs lists all pages in ascending order.
func (t *slotTable) runs(pages uint64) (out []vmmwire.Run) {
	for c := uint64(0); c*chunkPages < pages; c++ {
		for i, s := range t.chunks[c] {
			if s == 0 {
				continue
			}
			page, slot := c*chunkPages+uint64(i), uint64(s)-1
			if n := len(out); n > 0 && out[n-1].Page+out[n-1].Count == page && out[n-1].Slot+out[n-1].Count == slot {
				out[n-1].Count++
			} else {
				out = append(out, vmmwire.Run{Page: page, Count: 1, Slot: slot})
			}
		}
	}
	return out
}

// copy writes pages to their slots, many at a time.
func (p *capture) copy(mem *memory.Space, pages []memory.Run) error {
	w := memory.NewWriter(mem, p.Pages)
	for _, r := range pages {
		for page := r.Page; page < r.End(); {
			slot := p.slots.slot(page)
			n := uint64(1)
			for page+n < r.End() && p.slots.slot(page+n) == slot+n {
				n++
			}
			if p.slots.used > p.MaxPages {
				return errdefs.New(errdefs.ErrResourceExhausted, "more than %d pages to copy", p.MaxPages)
			}
			if err := w.Add(memory.Run{Page: page, Count: n}, slot); err != nil {
				return err
			}
			page += n
		}
	}
	return w.Flush()
}

func (p *capture) writeIndex() (pages, runs uint64, err error) {
	list := p.slots.runs(p.slots.lastPage())
	b := make([]byte, 0, len(list)*vmmwire.RunLen)
	for _, r := range list {
		b = vmmwire.AppendRun(b, r)
	}
	return p.slots.used, uint64(len(list)), writeFull(p.Index, b)
}

// lastPage is a bound of the pages in the table.
func (t *slotTable) lastPage() (end uint64) {
	for c := range t.chunks {
		end = max(end, (c+1)*chunkPages)
	}
	return end
}

// writeFull writes a file from its start and ends it there.
func writeFull(fd int, b []byte) error {
	n := int64(len(b))
	for off := int64(0); len(b) > 0; {
		w, err := unix.Pwrite(fd, b, off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b, off = b[w:], off+int64(w)
	}
	return unix.Ftruncate(fd, n)
}
