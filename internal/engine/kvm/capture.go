package kvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
	"forkd.dev/forkd/internal/vmmwire"
)

// File names of the artifacts of a capture.
const (
	memoryArtifact = "memory.layer"
	deviceArtifact = "device.state"
	diskArtifact   = "disk-000.cow1"
)

// Capture stores memory, devices and disk as they are at one instant. The monitor copies
// memory while the guest runs, and in the pause only what was written meanwhile; the disk
// is not copied at all. Only writing the layer file comes after the resume.
func (m *Machine) Capture(ctx context.Context, spec engine.CaptureSpec) (engine.CaptureResult, error) {
	if err := m.op.take(ctx); err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	parentID := ""
	if len(spec.Parent) > 0 {
		parentID = spec.Parent[len(spec.Parent)-1].ID
	}
	c := &capture{m: m, spec: spec, parent: m.lastMark()}
	if parentID != c.parent.Snapshot {
		return engine.CaptureResult{}, errdefs.New(errdefs.ErrInvalid, "capture %s: its parent is %q, not %q", m.rec.ID, c.parent.Snapshot, parentID)
	}
	defer c.close()
	res, err := c.run(ctx)
	if err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.rec.ID, err)
	}
	return res, nil
}

// capture is one capture under way.
type capture struct {
	m            *Machine
	spec         engine.CaptureSpec
	parent       mark
	view         memimage.View // of the parent
	pages, index *os.File      // memory files that the monitor fills
	state        *os.File
	next         *os.File // the overlay a source goes on with
	nextName     string
	slots        uint64 // pages that have room in pages
}

func (c *capture) close() {
	c.view.Close()
	for _, f := range []*os.File{c.pages, c.index, c.state, c.next} {
		if f != nil {
			_ = f.Close()
		}
	}
}

func (c *capture) run(ctx context.Context) (res engine.CaptureResult, err error) {
	if err := c.prepare(ctx); err != nil {
		return res, err
	}
	// The monitor copies while the guest runs.
	begin := &vmmwire.CaptureBegin{Pages: 0, Index: 1, MaxPages: c.slots, Everything: c.m.lostParent()}
	if err := c.m.command(ctx, begin, c.pages, c.index); err != nil {
		return res, err
	}
	if c.spec.BeforeStop != nil {
		if err := c.spec.BeforeStop(ctx); err != nil {
			return res, errors.Join(err, c.abort(ctx))
		}
	}
	done, err := c.stop(ctx)
	if err != nil {
		return res, err
	}
	res.Pause, res.CopiedBytes = done.Pause, int64(done.CopiedPages)*linux.PageSize
	if c.spec.After == engine.AfterEnd {
		// The disk is sealed and all is copied: there is nothing left to say.
		if err := c.m.killLocked(ctx); err != nil {
			return res, err
		}
	} else if c.spec.Resumed != nil {
		if err := c.spec.Resumed(ctx, res); err != nil {
			return res, err
		}
	}
	disks, err := c.linkOverlays(ctx)
	if err != nil {
		return res, err
	}
	if err := c.writeLayer(ctx, filepath.Join(c.spec.Dir, memoryArtifact)); err != nil {
		return res, err
	}
	res.Artifacts, res.LayerBytes, err = listArtifacts(c.spec.Dir, disks)
	return res, err
}

// prepare does what needs no stopped guest.
func (c *capture) prepare(ctx context.Context) (err error) {
	shape := c.m.rec.Shape
	if c.view, err = c.m.d.images.View(c.spec.Parent, shape.MemoryMiB); err != nil {
		return err
	}
	c.slots = uint64(shape.MemoryMiB) << 20 / linux.PageSize
	if c.pages, err = linux.MemFile("forkd-capture", int64(c.slots)*linux.PageSize); err != nil {
		return err
	}
	if c.index, err = linux.MemFile("forkd-index", 0); err != nil {
		return err
	}
	if err := c.touch(ctx); err != nil {
		return err
	}
	if c.state, err = os.OpenFile(filepath.Join(c.spec.Dir, deviceArtifact), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return fmt.Errorf("create device state: %w", err)
	}
	if c.spec.After == engine.AfterResume {
		top := c.m.overlays()
		c.nextName = overlayName(overlayIndex(top[len(top)-1]) + 1)
		c.next, err = newOverlay(filepath.Join(c.m.dir, c.nextName))
	}
	return err
}

// touch makes the memory that the copy will need, which is most of its cost, while the
// guest runs; it is ours then, not the machine's.
func (c *capture) touch(ctx context.Context) error {
	s := c.m.statsLocked(ctx)
	if s == nil || s.PrivatePages == 0 {
		return nil
	}
	// An eighth more, for what the guest writes until it stops.
	n := min(s.PrivatePages+s.PrivatePages/8+64, c.slots)
	if err := unix.Fallocate(int(c.pages.Fd()), 0, 0, int64(n)*linux.PageSize); err != nil {
		return fmt.Errorf("allocate memory for a capture of %d pages: %w", n, err)
	}
	return nil
}

// afterwards is time for what must be done although ctx may have ended. It is
// bounded: a monitor that its guest took over may never answer, and nothing else can
// be done to the machine meanwhile.
func afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
}

func (c *capture) abort(ctx context.Context) error {
	ctx, cancel := afterwards(ctx)
	defer cancel()
	return c.m.command(ctx, &vmmwire.Simple{Of: vmmwire.KindCaptureAbort})
}

// stop has the monitor pause the guest, take all of its state, and let it go on if it is to.
// The source goes on whatever failed.
func (c *capture) stop(ctx context.Context) (*vmmwire.Captured, error) {
	resume := c.spec.After == engine.AfterResume
	end := &vmmwire.CaptureEnd{State: 0, Run: resume}
	list := []*os.File{c.state}
	if resume {
		end.Devices = []vmmwire.Device{{Kind: vmmwire.DeviceBlock, Files: []int{1}, Args: vmmwire.BlockArgs(blocks(c.m.rec.Shape))}}
		list = append(list, c.next)
	}
	r, err := c.m.request(ctx, end, list)
	if err != nil {
		return nil, err
	}
	done, ok := r.(*vmmwire.Captured)
	if !ok {
		return nil, errdefs.New(errdefs.ErrGuest, "machine %s: the monitor answers a capture with a message of kind %d", c.m.rec.ID, r.Kind())
	}
	if resume {
		return done, c.m.pushOverlay(c.nextName)
	}
	return done, nil
}

// pushOverlay notes that the machine writes to another overlay now.
func (m *Machine) pushOverlay(name string) error {
	m.mu.Lock()
	m.rec.Overlays = append(m.rec.Overlays, name)
	rec := m.rec
	m.mu.Unlock()
	return writeRecord(m.dir, rec)
}

// linkOverlays gives the snapshot the machine's disk layers above its parent's: of
// one that ended all, of one that goes on all but the new one. Several, of captures that
// were not stored, become one.
func (c *capture) linkOverlays(ctx context.Context) ([]string, error) {
	mine := c.m.overlays()
	if c.spec.After == engine.AfterResume {
		mine = mine[:len(mine)-1]
	}
	mine = mine[c.parent.Overlays:]
	to := filepath.Join(c.spec.Dir, diskArtifact)
	var err error
	switch {
	case len(mine) > 1:
		err = c.mergeOverlays(ctx, mine, to)
	case c.spec.After == engine.AfterResume:
		err = os.Link(filepath.Join(c.m.dir, mine[0]), to)
	default:
		err = os.Rename(filepath.Join(c.m.dir, mine[0]), to)
	}
	if err != nil {
		return nil, fmt.Errorf("hand over disk layer: %w", err)
	}
	return []string{diskArtifact}, nil
}

func (c *capture) mergeOverlays(ctx context.Context, names []string, to string) error {
	m := diskMerge{parent: c.parent.Snapshot, out: to}
	defer func() {
		for _, f := range m.files {
			_ = f.Close()
		}
	}()
	for _, name := range names {
		f, err := os.Open(filepath.Join(c.m.dir, name))
		if err != nil {
			return err
		}
		m.files = append(m.files, f)
	}
	return mergeDisks(ctx, m)
}

// layerChunk is how many pages are compared with the parent at a time.
const layerChunk = 256

// writeLayer writes the copied pages that differ from the parent.
func (c *capture) writeLayer(ctx context.Context, path string) error {
	runs, err := c.runs()
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create memory layer: %w", err)
	}
	defer f.Close()
	w, err := layerfmt.NewWriter(f, layerfmt.Header{Units: c.slots, Parent: c.parent.Snapshot})
	if err != nil {
		return err
	}
	now, old := make([]byte, layerChunk*linux.PageSize), make([]byte, layerChunk*linux.PageSize)
	for _, r := range runs {
		for done := uint64(0); done < r.Count; {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(layerChunk, r.Count-done)
			bytes := n * linux.PageSize
			if _, err := c.pages.ReadAt(now[:bytes], int64(r.Slot+done)*linux.PageSize); err != nil {
				return fmt.Errorf("read captured pages: %w", err)
			}
			if err := c.view.Read(old[:bytes], r.Page+done); err != nil {
				return err
			}
			if err := memimage.PutChanged(w, r.Page+done, now[:bytes], old[:bytes]); err != nil {
				return err
			}
			done += n
		}
	}
	return w.Close()
}

// runs reads the index that the monitor wrote.
func (c *capture) runs() ([]vmmwire.Run, error) {
	st, err := c.index.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > int64(c.slots)*vmmwire.RunLen {
		return nil, errdefs.New(errdefs.ErrGuest, "machine %s: the monitor's index of a capture has %d bytes", c.m.rec.ID, st.Size())
	}
	b, err := io.ReadAll(io.NewSectionReader(c.index, 0, st.Size()))
	if err != nil {
		return nil, fmt.Errorf("read index of a capture: %w", err)
	}
	return vmmwire.ParseRuns(b, c.slots, c.slots)
}

func listArtifacts(dir string, disks []string) ([]engine.Artifact, int64, error) {
	var total int64
	artifacts := []engine.Artifact{
		{Name: memoryArtifact, Kind: kindMemory, Format: formatLayer},
		{Name: deviceArtifact, Kind: kindDevice, Format: formatState},
	}
	for _, name := range disks {
		artifacts = append(artifacts, engine.Artifact{Name: name, Kind: kindDisk, Format: formatCow})
	}
	for i := range artifacts {
		st, err := os.Stat(filepath.Join(dir, artifacts[i].Name))
		if err != nil {
			return nil, 0, fmt.Errorf("list artifacts: %w", err)
		}
		artifacts[i].Bytes = st.Sys().(*syscall.Stat_t).Blocks * 512
		total += artifacts[i].Bytes
	}
	return artifacts, total, nil
}
