package cow1

import (
	"fmt"
	"io"
	"slices"

	"forkd.dev/forkd/internal/errdefs"
)

// File is what an overlay is written to; *os.File is one.
type File interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
	Sync() error
}

// HolePuncher is implemented by files that can give space back. The range reads as
// zeros afterwards.
type HolePuncher interface {
	PunchHole(off, n int64) error
}

// Durability says what Flush guards against.
type Durability int

// What an overlay survives once Flush has returned.
const (
	// SyncHost: a crash of the host.
	SyncHost Durability = iota
	// SyncProcess: the end of the process. Flush costs microseconds.
	SyncProcess
)

// Overlay is the layer that a machine writes to.
type Overlay struct {
	f          File
	header     Header
	durability Durability

	pages map[uint64]*page
	last  struct { // the page used last
		no uint64
		p  *page
	}
	dirty []uint64 // pages that differ from the file

	slots uint64 // slots of the file, used or not
	// free slots may be used at once, freed ones only when a map that does not name them
	// is in the file: until then a crash would show the new content at the old block.
	free, freed bitmap
	data, zero  uint64

	unsynced bool // data was written since the last sync
	sealed   bool
	buf      []byte
}

// Create makes an empty overlay of f, which must be empty.
func Create(f File, h Header, d Durability) (*Overlay, error) {
	if err := h.check(); err != nil {
		return nil, fmt.Errorf("create disk overlay: %w: %w", errdefs.ErrInvalid, err)
	}
	if _, err := f.WriteAt(preamble{Header: h}.encode(), 0); err != nil {
		return nil, fmt.Errorf("create disk overlay: %w", err)
	}
	if err := f.Truncate(h.dataOffset()); err != nil {
		return nil, fmt.Errorf("create disk overlay: %w", err)
	}
	return &Overlay{f: f, header: h, durability: d, pages: make(map[uint64]*page)}, nil
}

// Header returns what the overlay describes.
func (o *Overlay) Header() Header { return o.header }

// Stats counts what the overlay holds.
func (o *Overlay) Stats() Stats {
	return Stats{DataBlocks: o.data, ZeroBlocks: o.zero, FileBytes: o.header.slotOffset(o.slots)}
}

// Find is Find of [Layer].
func (o *Overlay) Find(block, limit uint64) Run {
	no, at := block/pageEntries, block%pageEntries
	limit = min(limit, pageEntries-at)
	p := o.page(no)
	if p == nil {
		return Run{Kind: Absent, Count: limit}
	}
	return findRun(&p.entries, at, limit, o.header)
}

func (o *Overlay) page(no uint64) *page {
	if o.last.p != nil && o.last.no == no {
		return o.last.p
	}
	p := o.pages[no]
	if p != nil {
		o.last.no, o.last.p = no, p
	}
	return p
}

// change returns the page for changing an entry.
func (o *Overlay) change(no uint64) *page {
	p := o.page(no)
	if p == nil {
		p = new(page)
		o.pages[no] = p
		o.last.no, o.last.p = no, p
	}
	if !p.dirty {
		p.dirty = true
		o.dirty = append(o.dirty, no)
	}
	return p
}

// Place returns where the blocks from block on are to be written, at most limit of them
// without a gap, and gives a slot to those that have none. The caller writes all of the
// Count blocks at Offset.
func (o *Overlay) Place(block, limit uint64) (Run, error) {
	if o.sealed {
		return Run{}, errdefs.New(errdefs.ErrInternal, "write to a sealed disk overlay")
	}
	if r := o.Find(block, limit); r.Kind == Data {
		o.unsynced = true
		return r, nil
	}
	no, at := block/pageEntries, block%pageEntries
	limit = min(limit, pageEntries-at)
	first, err := o.allocate()
	if err != nil {
		return Run{}, err
	}
	p := o.change(no)
	o.setEntry(p, at, first)
	n := uint64(1)
	for n < limit && p.entries[at+n] < firstSlot && o.allocateAt(first+n) {
		o.setEntry(p, at+n, first+n)
		n++
	}
	o.unsynced = true
	return Run{Kind: Data, Count: n, Offset: o.header.slotOffset(first)}, nil
}

func (o *Overlay) setEntry(p *page, at, slot uint64) {
	if p.entries[at] == entryZero {
		o.zero--
	}
	o.data++
	p.entries[at] = uint32(slot) + firstSlot
}

// allocate returns a slot. There are never more slots than blocks: with as many, some
// are free or freed, or all blocks have one.
func (o *Overlay) allocate() (uint64, error) {
	if s, ok := o.free.take(); ok {
		return s, nil
	}
	if o.slots == o.header.Blocks {
		if err := o.Flush(); err != nil {
			return 0, err
		}
		if s, ok := o.free.take(); ok {
			return s, nil
		}
		return 0, errdefs.New(errdefs.ErrInternal, "disk overlay of %d blocks has no slot left", o.header.Blocks)
	}
	o.slots++
	return o.slots - 1, nil
}

// allocateAt takes exactly that slot if it is the next one at the end of the file.
func (o *Overlay) allocateAt(slot uint64) bool {
	if slot != o.slots || o.slots == o.header.Blocks {
		return false
	}
	o.slots++
	return true
}

// SetZero makes count blocks from block on zero and gives back their space.
func (o *Overlay) SetZero(block, count uint64) error {
	if o.sealed {
		return errdefs.New(errdefs.ErrInternal, "write to a sealed disk overlay")
	}
	for count > 0 {
		r := o.Find(block, count)
		if r.Kind != Zero {
			if err := o.clearRun(block, r); err != nil {
				return err
			}
		}
		block, count = block+r.Count, count-r.Count
	}
	return nil
}

// clearRun turns one run, which is in one page of the map, into zeros.
func (o *Overlay) clearRun(block uint64, r Run) error {
	p := o.change(block / pageEntries)
	at := block % pageEntries
	for i := range r.Count {
		if r.Kind == Data {
			o.freed.set(uint64(p.entries[at+i] - firstSlot))
			o.data--
		}
		p.entries[at+i] = entryZero
	}
	o.zero += r.Count
	if h, ok := o.f.(HolePuncher); ok && r.Kind == Data {
		// At once: if the map in the file still names the slots, they hold zeros.
		o.unsynced = true
		if err := h.PunchHole(r.Offset, int64(r.Count)*BlockSize); err != nil {
			return fmt.Errorf("give back disk space: %w", err)
		}
	}
	return nil
}

// Flush puts all that was written so far into the file, as the Durability says.
func (o *Overlay) Flush() error {
	if o.sealed {
		return nil
	}
	if err := o.flush(o.durability == SyncHost); err != nil {
		return fmt.Errorf("flush disk overlay: %w", err)
	}
	return nil
}

func (o *Overlay) flush(sync bool) error {
	// Data before the map that names it.
	if sync && o.unsynced {
		if err := o.f.Sync(); err != nil {
			return err
		}
		o.unsynced = false
	}
	if len(o.dirty) == 0 {
		return nil
	}
	if err := o.writeMap(); err != nil {
		return err
	}
	if sync {
		if err := o.f.Sync(); err != nil {
			return err
		}
	}
	for _, no := range o.dirty {
		o.pages[no].dirty = false
	}
	o.dirty = o.dirty[:0]
	o.free.absorb(&o.freed)
	return nil
}

// writeMap writes each dirty page to the place that does not hold its last copy.
func (o *Overlay) writeMap() error {
	if o.buf == nil {
		o.buf = make([]byte, pageLen)
	}
	slices.Sort(o.dirty)
	for _, no := range o.dirty {
		p := o.pages[no]
		next := p.generation + 1
		p.encode(o.buf, no, next)
		if _, err := o.f.WriteAt(o.buf, pageOffset(no, next&1)); err != nil {
			return fmt.Errorf("write map page %d: %w", no, err)
		}
		p.generation = next
	}
	return nil
}

// Seal ends writing: the file is a [Layer] from now on. It does not sync; publishing
// does. Nothing may have failed before.
func (o *Overlay) Seal() error {
	if o.sealed {
		return nil
	}
	if err := o.flush(false); err != nil {
		return fmt.Errorf("seal disk overlay: %w", err)
	}
	p := preamble{Header: o.header, sealed: true, slots: o.slots, data: o.data, zero: o.zero}
	if err := o.f.Truncate(o.header.slotOffset(o.slots)); err != nil {
		return fmt.Errorf("seal disk overlay: %w", err)
	}
	if _, err := o.f.WriteAt(p.encode(), 0); err != nil {
		return fmt.Errorf("seal disk overlay: %w", err)
	}
	o.sealed = true
	return nil
}

// AsLayer returns the sealed overlay as a layer of the same file.
func (o *Overlay) AsLayer() (*Layer, error) {
	if !o.sealed {
		return nil, ErrUnsealed
	}
	return Open(o.f, o.header.slotOffset(o.slots))
}
