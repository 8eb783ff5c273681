package cow1

import (
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
)

// Recover opens the overlay of size bytes that a process left in f without sealing it,
// as of its last Flush (with what was written later to blocks that were in it). It repairs what an
// interrupted Flush left, so that the file can be sealed or written again.
func Recover(f File, size int64, d Durability) (*Overlay, error) {
	o, err := recoverOverlay(f, size, d)
	if err != nil {
		return nil, fmt.Errorf("recover disk overlay: %w", err)
	}
	return o, nil
}

func recoverOverlay(f File, size int64, d Durability) (*Overlay, error) {
	p, err := readHeader(f, size)
	if err != nil {
		return nil, err
	}
	if p.sealed {
		return nil, errdefs.New(errdefs.ErrInvalid, "the file is a sealed layer")
	}
	// Create may not have come to set the length.
	if size < p.dataOffset() {
		if err := f.Truncate(p.dataOffset()); err != nil {
			return nil, err
		}
	}
	slots := min(uint64(max(size-p.dataOffset(), 0)+BlockSize-1)/BlockSize, p.Blocks)
	o := &Overlay{f: f, header: p.Header, durability: d, pages: make(map[uint64]*page), slots: slots}
	used := newBitmap(slots)
	b := make([]byte, 2*pageLen)
	for no := range p.pages() {
		if err := readFull(f, b, pageOffset(no, 0)); err != nil {
			return nil, err
		}
		if err := o.recoverPage(b, no, used); err != nil {
			return nil, err
		}
	}
	if err := f.Truncate(p.slotOffset(o.slots)); err != nil {
		return nil, err
	}
	for s := range o.slots {
		if used.set(s) {
			o.free.set(s)
		}
	}
	return o, nil
}

func (o *Overlay) recoverPage(b []byte, no uint64, used *bitmap) error {
	content, generation, damaged := newest(b, no)
	if damaged {
		// An interrupted write: the other place has the copy before, or there was none.
		if err := o.clearDamaged(b, no); err != nil {
			return err
		}
	}
	if content == nil {
		return nil
	}
	pg := &page{generation: generation}
	if err := decodeEntries(&pg.entries, content, o.header, no, o.header.Blocks); err != nil {
		return err
	}
	o.pages[no] = pg
	for i, e := range pg.entries {
		switch {
		case e == entryZero:
			o.zero++
		case e >= firstSlot && !used.set(uint64(e-firstSlot)):
			return fmt.Errorf("block %d and another one are in slot %d: %w", no*pageEntries+uint64(i), e-firstSlot, ErrContent)
		case e >= firstSlot:
			o.data++
			// A slot beyond the end is one whose write failed, perhaps for want of space.
			o.slots = max(o.slots, uint64(e-firstSlot)+1)
		}
	}
	return nil
}

func (o *Overlay) clearDamaged(b []byte, no uint64) error {
	for place := range uint64(2) {
		if state, _ := inspectCopy(b[place*pageLen:(place+1)*pageLen], no, place); state == copyDamaged {
			if _, err := o.f.WriteAt(zeros[:pageLen], pageOffset(no, place)); err != nil {
				return err
			}
		}
	}
	return nil
}
