package vmmwire

import (
	"encoding/binary"

	"forkd.dev/forkd/internal/errdefs"
)

// Run is one entry of a capture's index: Count guest pages from Page on, whose content
// lies in the pages file from page Slot on.
type Run struct{ Page, Count, Slot uint64 }

// RunLen is the length of a run in an index.
const RunLen = 24

// AppendRun appends the bytes of r.
func AppendRun(b []byte, r Run) []byte {
	b = binary.LittleEndian.AppendUint64(b, r.Page)
	b = binary.LittleEndian.AppendUint64(b, r.Count)
	return binary.LittleEndian.AppendUint64(b, r.Slot)
}

// ParseRuns reads an index. It checks that runs ascend, do not overlap, stay below
// pages, and refer to slots below slots. ErrCorrupt: they do not.
func ParseRuns(b []byte, pages, slots uint64) ([]Run, error) {
	if len(b)%RunLen != 0 || uint64(len(b)/RunLen) > pages {
		return nil, errdefs.New(errdefs.ErrCorrupt, "index of a capture has %d bytes", len(b))
	}
	runs := make([]Run, 0, len(b)/RunLen)
	end := uint64(0)
	for ; len(b) > 0; b = b[RunLen:] {
		r := Run{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])}
		switch {
		case r.Page < end || r.Page >= pages || r.Count == 0 || r.Count > pages-r.Page:
			return nil, errdefs.New(errdefs.ErrCorrupt, "index of a capture has %d pages at %d after %d", r.Count, r.Page, end)
		case r.Slot >= slots || r.Count > slots-r.Slot:
			return nil, errdefs.New(errdefs.ErrCorrupt, "index of a capture refers to slots %d to %d of %d", r.Slot, r.Slot+r.Count, slots)
		}
		end = r.Page + r.Count
		runs = append(runs, r)
	}
	return runs, nil
}
