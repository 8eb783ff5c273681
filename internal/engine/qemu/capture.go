package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/linux"
)

// File names of the artifacts of a capture; disk layers are numbered from the
// lowest on.
const (
	memoryArtifact = "memory.layer"
	deviceArtifact = "device.state"
)

// Capture stores memory, devices and disk as they are at one instant: everything
// is read while the guest is stopped, because nothing outside QEMU can
// write-protect its memory. What can be done before the stop is done before: the
// new overlay is opened, memory for the copy is touched. Only writing the layer
// file comes after the resume.
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
	defer m.mergeLater()
	res, err := c.run(ctx)
	if err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.rec.ID, err)
	}
	return res, nil
}

// capture is one capture under way.
type capture struct {
	m      *Machine
	spec   engine.CaptureSpec
	parent mark
	ram    linux.Mapping
	view   memimage.View // of the parent
	arena  []byte        // room for the copied pages
	runs   []linux.PageRun
	next   *nextOverlay // of a source that goes on
}

func (c *capture) close() {
	c.view.Close()
	c.m.d.arenas.give(c.arena)
	if c.next != nil {
		c.next.files.close()
	}
}

func (c *capture) run(ctx context.Context) (res engine.CaptureResult, err error) {
	if err := c.prepare(ctx); err != nil {
		return res, err
	}
	if c.spec.BeforeStop != nil {
		if err := c.spec.BeforeStop(ctx); err != nil {
			return res, err
		}
	}
	pause, err := c.stopped(ctx)
	if err != nil {
		return res, err
	}
	res.Pause = pause
	res.CopiedBytes = int64(linux.CountPages(c.runs)) * linux.PageSize
	if c.spec.Resumed != nil && c.spec.After == engine.AfterResume {
		if err := c.spec.Resumed(ctx, res); err != nil {
			return res, err
		}
	}
	if c.spec.After == engine.AfterResume {
		if err := c.m.releaseDescriptors(ctx); err != nil {
			return res, err
		}
	}
	disks, err := c.linkOverlays()
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
	if c.ram, err = c.m.ram(); err != nil {
		return err
	}
	if c.view, err = c.m.d.images.View(c.spec.Parent, c.m.rec.Shape.MemoryMiB); err != nil {
		return err
	}
	runs, err := linux.PrivatePages(c.m.rec.PID, c.ram)
	if err != nil {
		return err
	}
	// Some more, for what the guest writes until it stops.
	pages := int(linux.CountPages(runs))
	if c.arena, err = c.m.d.arenas.take((pages+pages/16+64)*linux.PageSize, (pages+pages/8+128)*linux.PageSize); err != nil {
		return err
	}
	if c.spec.After == engine.AfterResume {
		c.next, err = c.m.openNext(ctx)
	}
	return err
}

// stopped stops the guest, takes all of its state, and lets it go on if it is to.
// The source goes on whatever failed.
func (c *capture) stopped(ctx context.Context) (pause time.Duration, err error) {
	began := time.Now()
	if err := c.m.command(ctx, "stop", nil, nil); err != nil {
		return 0, err
	}
	if err = c.take(ctx); err == nil && c.spec.After == engine.AfterEnd {
		// QEMU flushes on stop but writes its metadata back only when it closes
		// the file, so it is asked to go, not killed.
		return time.Since(began), c.m.quit(ctx)
	}
	ctx, cancel := afterwards(ctx)
	defer cancel()
	if resumed := c.m.command(ctx, "cont", nil, nil); resumed != nil {
		return 0, errors.Join(err, resumed)
	}
	return time.Since(began), err
}

// take reads the state of the stopped guest.
func (c *capture) take(ctx context.Context) error {
	if err := c.m.saveDevices(ctx, filepath.Join(c.spec.Dir, deviceArtifact)); err != nil {
		return err
	}
	if c.next != nil {
		if err := c.m.pushOverlay(ctx, c.next); err != nil {
			return err
		}
	}
	runs, err := linux.PrivatePages(c.m.rec.PID, c.ram)
	if err != nil {
		return err
	}
	c.runs = runs
	bytes := int(linux.CountPages(runs)) * linux.PageSize
	if bytes > len(c.arena) {
		_ = linux.Free(c.arena)
		if c.arena, err = linux.Touched(bytes); err != nil {
			return err
		}
	}
	return linux.ReadPages(c.m.rec.PID, c.ram.Start, runs, c.arena)
}

// saveDevices writes the state of CPUs and devices. QEMU wants the descriptor
// opened write-only, and live=false keeps the block devices usable.
func (m *Machine) saveDevices(ctx context.Context, path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create device state: %w", err)
	}
	defer f.Close()
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := m.command(ctx, "add-fd", map[string]any{"opaque": opaqueState}, &set, f); err != nil {
		return err
	}
	args := map[string]any{"filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "live": false}
	return m.command(ctx, "xen-save-devices-state", args, nil)
}

// afterwards is time for what must be done although ctx may have ended. It is
// bounded: a QEMU that its guest took over may never answer, and nothing else can
// be done to the machine meanwhile.
func afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
}

// quit ends the process in order and waits for it.
func (m *Machine) quit(ctx context.Context) error {
	m.mu.Lock()
	m.killed = true
	m.mu.Unlock()
	// The reply may be lost with the connection: what counts is that it ends.
	err := m.command(ctx, "quit", nil, nil)
	if err != nil && !errors.Is(err, errdefs.ErrUnavailable) {
		return err
	}
	select {
	case <-m.done:
		return nil
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("wait for QEMU to quit: %w", ctx.Err()), m.killLocked(context.WithoutCancel(ctx)))
	}
}

func listArtifacts(dir string, disks []string) ([]engine.Artifact, int64, error) {
	var total int64
	artifacts := []engine.Artifact{
		{Name: memoryArtifact, Kind: kindMemory, Format: formatLayer},
		{Name: deviceArtifact, Kind: kindDevice, Format: formatXen},
	}
	for _, name := range disks {
		artifacts = append(artifacts, engine.Artifact{Name: name, Kind: kindDisk, Format: formatQcow2})
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
