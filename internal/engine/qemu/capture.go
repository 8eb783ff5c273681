package qemu

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
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
	"forkd.dev/forkd/internal/linux"
)

// File names of the artifacts of a capture.
const (
	memoryArtifact = "memory.layer"
	deviceArtifact = "device.state"
	diskArtifact   = "disk.qcow2"
)

// Capture stores memory, devices and disk as they are at one instant: everything
// is read while the guest is stopped, because nothing outside QEMU can
// write-protect its memory. Only writing the layer file comes after the resume.
func (m *Machine) Capture(ctx context.Context, spec engine.CaptureSpec) (engine.CaptureResult, error) {
	if err := m.op.take(ctx); err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.rec.ID, err)
	}
	defer m.op.give()
	parentID := ""
	if len(spec.Parent) > 0 {
		parentID = spec.Parent[len(spec.Parent)-1].ID
	}
	if parentID != m.rec.MappedID {
		return engine.CaptureResult{}, errdefs.New(errdefs.ErrInvalid, "capture %s: it was restored from %q, not from %q", m.rec.ID, m.rec.MappedID, parentID)
	}
	var parent *os.File
	if parentID != "" {
		f, err := m.d.residents.get(ctx, spec.Parent, m.rec.Shape.MemoryMiB)
		if err != nil {
			return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.rec.ID, err)
		}
		parent = f
	}
	res, err := m.capture(ctx, spec, parent)
	if err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.rec.ID, err)
	}
	return res, nil
}

func (m *Machine) capture(ctx context.Context, spec engine.CaptureSpec, parent *os.File) (res engine.CaptureResult, err error) {
	began := time.Now()
	if err := m.command(ctx, "stop", nil, nil); err != nil {
		return res, err
	}
	stopped := true
	resume := func() error {
		if !stopped || spec.After != engine.AfterResume {
			return nil
		}
		stopped = false
		ctx, cancel := afterwards(ctx)
		defer cancel()
		return m.command(ctx, "cont", nil, nil)
	}
	defer func() {
		if err != nil { // the source goes on whatever failed
			err = errors.Join(err, resume())
		}
	}()
	if err := m.saveDevices(ctx, filepath.Join(spec.Dir, deviceArtifact)); err != nil {
		return res, err
	}
	pages, err := m.copyPages()
	if err != nil {
		return res, err
	}
	if err := m.captureDisk(ctx, filepath.Join(spec.Dir, diskArtifact), spec.After); err != nil {
		return res, err
	}
	if err := resume(); err != nil {
		return res, err
	}
	res.Pause = time.Since(began)
	res.CopiedBytes = int64(linux.CountPages(pages.runs)) * linux.PageSize
	if err := pages.writeLayer(ctx, filepath.Join(spec.Dir, memoryArtifact), m.rec.MappedID, parent); err != nil {
		return res, err
	}
	res.Artifacts, res.LayerBytes, err = listArtifacts(spec.Dir)
	return res, err
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
	if err := m.command(ctx, "add-fd", nil, &set, f); err != nil {
		return err
	}
	args := map[string]any{"filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "live": false}
	err = m.command(ctx, "xen-save-devices-state", args, nil)
	ctx, cancel := afterwards(ctx)
	defer cancel()
	return errors.Join(err, m.command(ctx, "remove-fd", map[string]any{"fdset-id": set.ID}, nil))
}

// afterwards is time for what must be done although ctx may have ended. It is
// bounded: a QEMU that its guest took over may never answer, and nothing else can
// be done to the machine meanwhile.
func afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
}

// capturedPages are copies of the guest's private pages at the pause; arena holds
// the runs one after the other.
type capturedPages struct {
	ram   linux.Mapping
	runs  []linux.PageRun
	arena []byte
}

func (m *Machine) copyPages() (*capturedPages, error) {
	ram, err := m.ram()
	if err != nil {
		return nil, err
	}
	runs, err := linux.PrivatePages(m.rec.PID, ram)
	if err != nil {
		return nil, err
	}
	p := &capturedPages{ram: ram, runs: runs, arena: make([]byte, linux.CountPages(runs)*linux.PageSize)}
	off := uint64(0)
	for _, r := range runs {
		n := r.Count * linux.PageSize
		if err := linux.ReadProcess(m.rec.PID, ram.Start+r.Start*linux.PageSize, p.arena[off:off+n]); err != nil {
			return nil, err
		}
		off += n
	}
	return p, nil
}

// layerChunk is how many bytes are compared with the parent at a time.
const layerChunk = 1 << 20

// writeLayer writes the pages that differ from parent (nil means zeros).
func (p *capturedPages) writeLayer(ctx context.Context, path, parentID string, parent *os.File) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create memory layer: %w", err)
	}
	defer f.Close()
	w, err := layerfmt.NewWriter(f, layerfmt.Header{Units: (p.ram.End - p.ram.Start) / linux.PageSize, Parent: parentID})
	if err != nil {
		return err
	}
	rest := p.arena
	old := make([]byte, layerChunk)
	for _, r := range p.runs {
		for page := r.Start; page < r.Start+r.Count; {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := min(layerChunk, (r.Start+r.Count-page)*linux.PageSize)
			if err := readParent(parent, old[:n], int64(page*linux.PageSize)); err != nil {
				return err
			}
			if err := putChanged(w, page, rest[:n], old[:n]); err != nil {
				return err
			}
			rest = rest[n:]
			page += n / linux.PageSize
		}
	}
	return w.Close()
}

func readParent(parent *os.File, b []byte, off int64) error {
	if parent == nil {
		clear(b)
		return nil
	}
	if _, err := parent.ReadAt(b, off); err != nil {
		return fmt.Errorf("read parent memory at %d: %w", off, err)
	}
	return nil
}

// putChanged writes the pages of now that differ from old.
func putChanged(w *layerfmt.Writer, page uint64, now, old []byte) error {
	for len(now) > 0 {
		if string(now[:linux.PageSize]) != string(old[:linux.PageSize]) {
			if err := w.Put(page, now[:linux.PageSize]); err != nil {
				return err
			}
		}
		now, old, page = now[linux.PageSize:], old[linux.PageSize:], page+1
	}
	return nil
}

// captureDisk stores the machine's overlay. A source that ends gives its file
// away; one that goes on gets it copied inside the pause.
func (m *Machine) captureDisk(ctx context.Context, path string, after engine.After) error {
	overlay := filepath.Join(m.dir, overlayFile)
	if after == engine.AfterEnd {
		// QEMU flushes on stop but writes its metadata back only when it closes
		// the file, so it is asked to go, not killed.
		if err := m.quit(ctx); err != nil {
			return err
		}
		if err := os.Rename(overlay, path); err != nil {
			return fmt.Errorf("move disk layer: %w", err)
		}
		return nil
	}
	return copySparse(path, overlay)
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
	if err := m.awaitEnd(ctx); err != nil {
		return errors.Join(fmt.Errorf("wait for QEMU to quit: %w", err), m.killLocked(context.WithoutCancel(ctx)))
	}
	return nil
}

// copySparse copies src to the new file dst, sharing blocks where the file system
// can, and keeping holes.
func copySparse(dst, src string) error {
	in, err := os.Open(src)
	if err != nil {
		return fmt.Errorf("copy disk layer: %w", err)
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("copy disk layer: %w", err)
	}
	defer out.Close()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		return nil
	}
	st, err := in.Stat()
	if err != nil {
		return fmt.Errorf("copy disk layer: %w", err)
	}
	for off := int64(0); ; {
		start, end, ok, err := linux.NextData(in, off)
		if err != nil {
			return fmt.Errorf("copy disk layer: %w", err)
		}
		if !ok {
			break
		}
		if _, err := io.Copy(io.NewOffsetWriter(out, start), io.NewSectionReader(in, start, end-start)); err != nil {
			return fmt.Errorf("copy disk layer: %w", err)
		}
		off = end
	}
	if err := out.Truncate(st.Size()); err != nil {
		return fmt.Errorf("copy disk layer: %w", err)
	}
	return nil
}

func listArtifacts(dir string) ([]engine.Artifact, int64, error) {
	var total int64
	artifacts := []engine.Artifact{
		{Name: memoryArtifact, Kind: kindMemory, Format: formatLayer},
		{Name: deviceArtifact, Kind: kindDevice, Format: formatXen},
		{Name: diskArtifact, Kind: kindDisk, Format: formatQcow2},
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
