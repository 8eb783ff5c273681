package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"forkd.dev/forkd/internal/engine"
)

// A machine owns a stack of overlays, normally one. A capture whose source goes on
// puts a new one on top at the pause, and those below become part of the snapshot,
// sharing the files until the snapshot is published. If it never is, the stack
// stays as it is: the next capture takes all of it.

// nextOverlay is an overlay that QEMU has opened but does not use yet.
type nextOverlay struct {
	index int
	name  string
	set   int // QEMU's descriptor set
	files overlayFiles
}

// overlays returns the names of the machine's overlays, topmost last.
func (m *Machine) overlays() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.rec.Overlays...)
}

// openNext creates the next overlay and has QEMU open it.
func (m *Machine) openNext(ctx context.Context) (_ *nextOverlay, err error) {
	top := m.overlays()
	n := &nextOverlay{index: overlayIndex(top[len(top)-1]) + 1}
	n.name = overlayName(n.index)
	path := filepath.Join(m.dir, n.name)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove left overlay: %w", err)
	}
	if n.files, err = newOverlay(path, m.rec.Shape.DiskMiB); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			n.files.close()
		}
	}()
	// A capture that was given up may have left the node: it is opened anew.
	_ = m.command(ctx, "blockdev-del", map[string]any{"node-name": overlayNode(n.index)}, nil)
	var added struct {
		Set int `json:"fdset-id"`
	}
	if err := m.command(ctx, "add-fd", map[string]any{"opaque": opaqueWritable}, &added, n.files.rw); err != nil {
		return nil, err
	}
	n.set = added.Set
	if err := m.command(ctx, "add-fd", map[string]any{"fdset-id": n.set, "opaque": overlayNode(n.index)}, nil, n.files.ro); err != nil {
		return nil, err
	}
	node := map[string]any{
		"driver": "qcow2", "node-name": overlayNode(n.index), "discard": "unmap", "backing": nil,
		"file": map[string]any{
			"driver": "file", "node-name": fileNode(overlayNode(n.index)), "filename": fmt.Sprintf("/dev/fdset/%d", n.set), "locking": "off",
			"auto-read-only": true, "discard": "unmap",
		},
	}
	if err := m.command(ctx, "blockdev-add", node, nil); err != nil {
		return nil, err
	}
	return n, nil
}

// overlayIndex is the inverse of overlayName.
func overlayIndex(name string) int {
	var i int
	_, _ = fmt.Sscanf(strings.TrimSuffix(name, ".qcow2"), "disk%d", &i)
	return i
}

// pushOverlay puts n on top of the stopped machine's disk.
func (m *Machine) pushOverlay(ctx context.Context, n *nextOverlay) error {
	args := map[string]any{"node": overlayNode(n.index - 1), "overlay": overlayNode(n.index)}
	if err := m.command(ctx, "blockdev-snapshot", args, nil); err != nil {
		return err
	}
	m.mu.Lock()
	m.rec.Overlays = append(m.rec.Overlays, n.name)
	rec := m.rec
	m.mu.Unlock()
	return writeRecord(m.dir, rec)
}

// linkOverlays gives the snapshot the machine's disk layers above its parent's: of
// one that ended all, of one that goes on all but the new one.
func (c *capture) linkOverlays() ([]string, error) {
	mine := c.m.overlays()
	if c.spec.After == engine.AfterResume {
		mine = mine[:len(mine)-1]
	}
	mine = mine[c.parent.Overlays:]
	names := make([]string, len(mine))
	for i, name := range mine {
		names[i] = fmt.Sprintf("disk-%03d.qcow2", i)
		from, to := filepath.Join(c.m.dir, name), filepath.Join(c.spec.Dir, names[i])
		move := os.Rename
		if c.spec.After == engine.AfterResume {
			move = os.Link
		}
		if err := move(from, to); err != nil {
			return nil, fmt.Errorf("hand over disk layer: %w", err)
		}
	}
	return names, nil
}

// releaseDescriptors closes what a capture has left open for writing: device state,
// and overlays that are only read now. QEMU closes them only while the guest runs.
func (m *Machine) releaseDescriptors(ctx context.Context) error {
	var sets []fdSet
	if err := m.command(ctx, "query-fdsets", nil, &sets); err != nil {
		return err
	}
	top := m.topSet(sets)
	for _, s := range sets {
		for _, f := range s.FDs {
			if f.Opaque != opaqueState && (f.Opaque != opaqueWritable || s.Set == top) {
				continue
			}
			if err := m.command(ctx, "remove-fd", map[string]any{"fdset-id": s.Set, "fd": f.FD}, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// topSet finds the descriptor set of the overlay that is written. QEMU uses numbers of
// closed sets again, so they say nothing; of a machine that an older daemon made, whose
// sets do not tell their overlay, none was closed, and it is the highest.
func (m *Machine) topSet(sets []fdSet) int {
	overlays := m.overlays()
	node, highest := nodeOf(overlays[len(overlays)-1]), 0
	for _, s := range sets {
		for _, f := range s.FDs {
			if f.Opaque == node {
				return s.Set
			}
			if f.Opaque == opaqueWritable {
				highest = max(highest, s.Set)
			}
		}
	}
	return highest
}

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
	defer m.mergeLater()
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
	rec := m.rec
	m.mu.Unlock()
	if len(rec.Captures) == before {
		return nil
	}
	return writeRecord(m.dir, rec)
}
