package kvm

import (
	"context"
	"fmt"
	"slices"

	"forkd.dev/forkd/internal/vmmwire"
)

// lastMark is what the machine's next capture is a difference to.
func (m *Machine) lastMark() mark {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := len(m.rec.Captures); n > 0 {
		return m.rec.Captures[n-1]
	}
	return mark{Snapshot: m.rec.ForkedID}
}

// Parent returns the snapshot that the machine's next capture is a difference to.
func (m *Machine) Parent() string { return m.lastMark().Snapshot }

// Stored makes the snapshot the parent of later captures. The machine keeps its
// links to the disk layers: should the snapshot be deleted, the next capture holds
// them again.
func (m *Machine) Stored(ctx context.Context, snapshotID string) error {
	if err := m.op.take(ctx); err != nil {
		return fmt.Errorf("settle capture of %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	if err := m.command(ctx, &vmmwire.Simple{Of: vmmwire.KindStored}); err != nil {
		return fmt.Errorf("settle capture: %w", err)
	}
	return m.changeMarks(func(all []mark, overlays int) []mark {
		return append(all, mark{Snapshot: snapshotID, Overlays: overlays - 1})
	})
}

// forsake forgets a capture that is being deleted.
func (m *Machine) forsake(snapshotID string) error {
	return m.changeMarks(func(all []mark, _ int) []mark {
		return slices.DeleteFunc(all, func(k mark) bool { return k.Snapshot == snapshotID })
	})
}

func (m *Machine) changeMarks(change func(all []mark, overlays int) []mark) error {
	m.mu.Lock()
	before := len(m.rec.Captures)
	m.rec.Captures = change(slices.Clone(m.rec.Captures), len(m.rec.Overlays))
	m.rec.LostParent = m.rec.LostParent || len(m.rec.Captures) < before
	rec := m.rec
	m.mu.Unlock()
	if len(rec.Captures) == before {
		return nil
	}
	return writeRecord(m.dir, rec)
}

// lostParent tells whether the monitor knows only what was written since a capture that
// was deleted.
func (m *Machine) lostParent() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rec.LostParent
}
