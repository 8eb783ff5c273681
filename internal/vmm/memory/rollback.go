package memory

import (
	"fmt"
	"sort"

	"golang.org/x/sys/unix"
)

// dropPages is the number of pages from which giving pages back to the kernel is cheaper
// than copying their old content: a page that is copied back stays the guest's, which
// then writes to it without a fault; a dropped one is faulted in again.
const dropPages = 8192

// Rollback makes the content equal to plan, where only the pages of changed may differ
// from it. The mappings stay as they are.
func (s *Space) Rollback(plan Plan, changed []Run) error {
	return s.rollback(plan, changed, Count(changed) >= dropPages)
}

func (s *Space) rollback(plan Plan, changed []Run, drop bool) error {
	if err := plan.check(s.size / PageSize); err != nil {
		return err
	}
	for _, run := range changed {
		if err := s.restoreRun(plan, run, drop); err != nil {
			return fmt.Errorf("roll back guest memory: %w", err)
		}
	}
	return nil
}

// restoreRun splits a run by the ranges of plan.
func (s *Space) restoreRun(plan Plan, run Run, drop bool) error {
	i := sort.Search(len(plan), func(i int) bool { return plan[i].End() > run.Page })
	for run.Count > 0 {
		part := Range{Page: run.Page, Count: run.Count}
		if i < len(plan) && plan[i].Page <= run.Page {
			r := plan[i]
			part.Count = min(run.Count, r.End()-run.Page)
			if part.Source = r.Source; r.Source != nil {
				part.Offset = r.Offset + (run.Page-r.Page)*PageSize
			}
			i++
		} else if i < len(plan) {
			part.Count = min(run.Count, plan[i].Page-run.Page)
		}
		if err := s.restorePart(part, drop); err != nil {
			return err
		}
		run = Run{run.Page + part.Count, run.Count - part.Count}
	}
	return nil
}

func (s *Space) restorePart(part Range, drop bool) error {
	at := s.mem[part.Page*PageSize : part.End()*PageSize]
	if (drop || part.Source == nil) && s.liesUnder(part) {
		return unix.Madvise(at, unix.MADV_DONTNEED)
	}
	if part.Source == nil {
		clear(at)
		return nil
	}
	return readFull(part.Source.FD, at, part.Offset)
}

// liesUnder tells whether the mapping itself holds what part says, so that dropping the
// private pages is all it takes.
func (s *Space) liesUnder(part Range) bool {
	i := sort.Search(len(s.mapped), func(i int) bool { return s.mapped[i].page+s.mapped[i].count > part.Page })
	if part.Source == nil {
		return i == len(s.mapped) || s.mapped[i].page >= part.End()
	}
	if i == len(s.mapped) {
		return false
	}
	m := s.mapped[i]
	return m.page <= part.Page && part.End() <= m.page+m.count && m.file == part.Source.id &&
		m.offset+(part.Page-m.page)*PageSize == part.Offset
}

// Differs lists the pages that plan takes from elsewhere than the mapping does. They and
// the private pages are all that can differ from plan.
func (s *Space) Differs(plan Plan) []Run {
	var runs []Run
	last := uint64(0)
	add := func(part Range) {
		if part.Count > 0 && !s.liesUnder(part) {
			runs = s.appendDifferent(runs, part)
		}
	}
	for _, r := range plan {
		add(Range{Page: last, Count: r.Page - last})
		add(r)
		last = r.End()
	}
	add(Range{Page: last, Count: s.size/PageSize - last})
	return runs
}

// appendDifferent adds those pages of part that the mapping has differently, cut at the
// borders of mapped ranges.
func (s *Space) appendDifferent(runs []Run, part Range) []Run {
	for part.Count > 0 {
		piece := part
		i := sort.Search(len(s.mapped), func(i int) bool { return s.mapped[i].page+s.mapped[i].count > part.Page })
		switch {
		case i == len(s.mapped):
		case s.mapped[i].page > part.Page:
			piece.Count = min(part.Count, s.mapped[i].page-part.Page)
		default:
			piece.Count = min(part.Count, s.mapped[i].page+s.mapped[i].count-part.Page)
		}
		if !s.liesUnder(piece) {
			runs = appendRun(runs, piece.Page, piece.End())
		}
		part.Page, part.Count = part.Page+piece.Count, part.Count-piece.Count
		if part.Source != nil {
			part.Offset += piece.Count * PageSize
		}
	}
	return runs
}

// Union joins two ascending lists of runs.
func Union(a, b []Run) []Run {
	out := make([]Run, 0, len(a)+len(b))
	for len(a) > 0 || len(b) > 0 {
		if len(b) == 0 || (len(a) > 0 && a[0].Page <= b[0].Page) {
			out, a = appendRun(out, a[0].Page, a[0].End()), a[1:]
		} else {
			out, b = appendRun(out, b[0].Page, b[0].End()), b[1:]
		}
	}
	return out
}

// Mapped lists the pages that come from files.
func (s *Space) Mapped() (runs []Run) {
	for _, m := range s.mapped {
		runs = appendRun(runs, m.page, m.page+m.count)
	}
	return runs
}
