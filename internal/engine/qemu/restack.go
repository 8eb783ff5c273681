package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/ident"
	"forkd.dev/forkd/internal/linux"
)

// Each capture leaves its machine one overlay more, and with them grow the time of
// each flush, the files that QEMU has open and those that a capture hands over. So
// when there are many the ones below the top, which nobody writes any more, are
// merged into one file in the background, and QEMU is told to read that instead. The
// files of published snapshots stay as they are: the machine had links to them only.
//
// A crash before the record is written leaves both: the record names the old
// overlays, which hold the same, so that captures go on as before.

// maxOverlays is how many overlays below the top a machine has before some are merged.
const maxOverlays = 24

// mergeSpare is what must stay free of the disk beside the merged file.
const mergeSpare = 1 << 30

// mergedName begins the names of overlays that were merged of others.
const mergedName = "merged-"

// nodeOf is the block node of an overlay by its file.
func nodeOf(name string) string {
	if strings.HasPrefix(name, mergedName) {
		return strings.TrimSuffix(name, ".qcow2")
	}
	var i int
	if n, _ := fmt.Sscanf(name, lowerPrefix+"%d.qcow2", &i); n == 1 {
		return fmt.Sprintf("disk%d", i+1) // above the root file system
	}
	return overlayNode(overlayIndex(name))
}

// stretch is a run of overlays below the top.
type stretch struct {
	from, to int // in record.Overlays, to is not part of it
	names    []string
}

// mergeable returns the overlays that are to be merged now, none if there are few. The
// last stored capture is never among others of the same stretch: it is the parent of
// the next and must stay the lowest n overlays.
func (m *Machine) mergeable() stretch {
	m.mu.Lock()
	defer m.mu.Unlock()
	top := len(m.rec.Overlays) - 1
	from, stored := 0, 0
	if n := len(m.rec.Captures); n > 0 {
		stored = m.rec.Captures[n-1].Overlays
	}
	if stored < top {
		from = stored // what no stored capture holds
	}
	if m.rec.Disks == 0 || top-from < maxOverlays {
		return stretch{}
	}
	sizes := make([]int64, 0, top-from)
	for _, name := range m.rec.Overlays[from:top] {
		var st syscall.Stat_t
		if err := syscall.Stat(filepath.Join(m.dir, name), &st); err != nil {
			return stretch{}
		}
		sizes = append(sizes, st.Blocks)
	}
	if !m.mergeFailed { // else the order of nodes may not be what the record says: start from the ground
		from += engine.MergeFrom(sizes, maxOverlays/2)
	}
	return stretch{from: from, to: top, names: slices.Clone(m.rec.Overlays[from:top])}
}

// mergeLater merges overlays in the background if there are many.
func (m *Machine) mergeLater() {
	s := m.mergeable()
	m.mu.Lock()
	due := len(s.names) > 1 && !m.restacking && m.d.ctx.Err() == nil
	m.restacking = m.restacking || due
	m.mu.Unlock()
	if !due {
		return
	}
	m.d.group.Go(func() {
		ctx, cancel := context.WithCancel(m.d.ctx)
		defer cancel()
		go func() {
			select {
			case <-m.left: // it has ended
				cancel()
			case <-ctx.Done():
			}
		}()
		err := m.restack(ctx, s)
		m.mu.Lock()
		m.restacking, m.mergeFailed = false, err != nil
		m.mu.Unlock()
		if err != nil && ctx.Err() == nil {
			m.d.cfg.Log("merge disk layers of %s: %v", m.rec.ID, err)
		}
	})
}

// restack replaces the overlays of s by one.
func (m *Machine) restack(ctx context.Context, s stretch) error {
	name := mergedName + ident.New(ident.Image)[2:10] + ".qcow2"
	temp := filepath.Join(m.d.cfg.Dir, mergePrefix+name) // not in m.dir, which may be removed meanwhile
	defer os.Remove(temp)
	if err := m.mergeOverlays(ctx, s, temp); err != nil {
		return err
	}
	if err := m.op.take(ctx); err != nil {
		return err
	}
	defer m.op.give()
	select {
	case <-m.done:
		return nil
	default:
	}
	path := filepath.Join(m.dir, name)
	if err := os.Link(temp, path); err != nil {
		return err
	}
	if err := m.swapOverlays(ctx, s, name); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	if err := m.recordMerge(s, name); err != nil {
		return err
	}
	for _, old := range s.names {
		if err := os.Remove(filepath.Join(m.dir, old)); err != nil {
			m.d.cfg.Log("remove merged disk layer: %v", err)
		}
	}
	return nil
}

// mergeOverlays writes the file.
func (m *Machine) mergeOverlays(ctx context.Context, s stretch, out string) error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	need := int64(mergeSpare)
	for _, name := range s.names {
		f, err := os.Open(filepath.Join(m.dir, name))
		if err != nil {
			return err
		}
		files = append(files, f)
		st, err := f.Stat()
		if err != nil {
			return err
		}
		need += st.Sys().(*syscall.Stat_t).Blocks * 512
	}
	disk, err := linux.ReadDisk(m.d.cfg.Dir)
	if err != nil {
		return err
	}
	if disk.AvailableBytes < need {
		return errdefs.New(errdefs.ErrResourceExhausted, "%d MiB of the disk are free, %d are needed", disk.AvailableBytes>>20, need>>20)
	}
	return m.d.mergeDisks(ctx, mergeWanted{files: files, out: out, bytes: backgroundBytesPerSecond})
}

// swapOverlays has QEMU read the merged file in place of those of s. On an error it
// goes on with them.
func (m *Machine) swapOverlays(ctx context.Context, s stretch, name string) error {
	m.mu.Lock()
	overlays, disks := slices.Clone(m.rec.Overlays), m.rec.Disks
	m.mu.Unlock()
	if len(overlays) <= s.to || !slices.Equal(overlays[s.from:s.to], s.names) {
		return errdefs.New(errdefs.ErrConflict, "the overlays have changed meanwhile")
	}
	below := fmt.Sprintf("disk%d", disks-1)
	if s.from > 0 {
		below = nodeOf(overlays[s.from-1])
	}
	set, err := m.addMerged(ctx, name, below)
	if err != nil {
		return err
	}
	above := nodeOf(overlays[s.to])
	options := map[string]any{
		"driver": "qcow2", "node-name": above, "discard": "unmap", "backing": nodeOf(name), "file": fileNode(above),
		"read-only": s.to < len(overlays)-1,
	}
	if err := m.command(ctx, "blockdev-reopen", map[string]any{"options": []any{options}}, nil); err != nil {
		_ = m.command(ctx, "blockdev-del", map[string]any{"node-name": nodeOf(name)}, nil)
		_ = m.command(ctx, "remove-fd", map[string]any{"fdset-id": set}, nil)
		return err
	}
	// From here on nothing reads the old ones. What cannot be closed stays open.
	for _, old := range slices.Backward(s.names) {
		_ = m.command(ctx, "blockdev-del", map[string]any{"node-name": nodeOf(old)}, nil)
	}
	return m.closeSets(ctx, s.names)
}

// addMerged has QEMU open the merged file.
func (m *Machine) addMerged(ctx context.Context, name, below string) (set int, err error) {
	f, err := os.Open(filepath.Join(m.dir, name))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var added struct {
		Set int `json:"fdset-id"`
	}
	if err := m.command(ctx, "add-fd", map[string]any{"opaque": nodeOf(name)}, &added, f); err != nil {
		return 0, err
	}
	node := map[string]any{
		"driver": "qcow2", "node-name": nodeOf(name), "read-only": true, "backing": below,
		"file": map[string]any{
			"driver": "file", "node-name": fileNode(nodeOf(name)), "filename": fmt.Sprintf("/dev/fdset/%d", added.Set),
			"read-only": true, "locking": "off",
		},
	}
	if err := m.command(ctx, "blockdev-add", node, nil); err != nil {
		_ = m.command(ctx, "remove-fd", map[string]any{"fdset-id": added.Set}, nil)
		return 0, err
	}
	return added.Set, nil
}

// fdSet is one of QEMU's descriptor sets.
type fdSet struct {
	Set int `json:"fdset-id"`
	FDs []struct {
		FD     int    `json:"fd"`
		Opaque string `json:"opaque"`
	} `json:"fds"`
}

// closeSets closes the descriptors of overlays that QEMU does not use any more.
func (m *Machine) closeSets(ctx context.Context, names []string) error {
	var sets []fdSet
	if err := m.command(ctx, "query-fdsets", nil, &sets); err != nil {
		return err
	}
	nodes := map[string]bool{}
	for _, name := range names {
		nodes[nodeOf(name)] = true
	}
	for _, s := range sets {
		for _, f := range s.FDs {
			if !nodes[f.Opaque] {
				continue
			}
			if err := m.command(ctx, "remove-fd", map[string]any{"fdset-id": s.Set}, nil); err != nil {
				return err
			}
			break
		}
	}
	return nil
}

// recordMerge notes the new stack. Captures that end inside of what was merged cannot
// be told from their successors any more: they are no parents now.
func (m *Machine) recordMerge(s stretch, name string) error {
	m.mu.Lock()
	less := s.to - s.from - 1
	m.rec.Overlays = slices.Concat(m.rec.Overlays[:s.from:s.from], []string{name}, m.rec.Overlays[s.to:])
	var kept []mark
	for _, k := range m.rec.Captures {
		switch {
		case k.Overlays <= s.from:
			kept = append(kept, k)
		case k.Overlays >= s.to:
			kept = append(kept, mark{Snapshot: k.Snapshot, Overlays: k.Overlays - less})
		}
	}
	m.rec.Captures = kept
	rec := m.rec
	m.mu.Unlock()
	return writeRecord(m.dir, rec)
}
