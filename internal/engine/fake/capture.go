package fake

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt"
)

// The artifacts of a capture.
const (
	memoryArtifact = "memory.layer"
	diskArtifact   = "disk.json"
	deviceArtifact = "device.json"
	formatDisk     = "fake-disk"
	formatDevice   = "fake-device"
)

// Capture stores what differs from the machine's parent.
func (m *Machine) Capture(ctx context.Context, spec engine.CaptureSpec) (engine.CaptureResult, error) {
	if err := m.p.take(ctx); err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.ID(), err)
	}
	defer m.p.give()
	res, err := m.capture(ctx, spec)
	if err != nil {
		return engine.CaptureResult{}, fmt.Errorf("capture %s: %w", m.ID(), err)
	}
	return res, nil
}

func (m *Machine) capture(ctx context.Context, spec engine.CaptureSpec) (engine.CaptureResult, error) {
	parentID, parent, err := m.parentOf(spec)
	if err != nil {
		return engine.CaptureResult{}, err
	}
	if spec.BeforeStop != nil {
		if err := spec.BeforeStop(ctx); err != nil {
			return engine.CaptureResult{}, err
		}
	}
	began := time.Now()
	now, err := m.freeze(ctx, spec.After)
	if err != nil {
		return engine.CaptureResult{}, err
	}
	pause := time.Since(began)
	if spec.Resumed != nil && spec.After == engine.AfterResume {
		if err := spec.Resumed(ctx, engine.CaptureResult{Pause: pause}); err != nil {
			return engine.CaptureResult{}, err
		}
	}
	res, err := m.store(spec.Dir, parentID, now, parent)
	res.Pause = pause
	if err == nil && spec.After == engine.AfterEnd {
		m.p.end("captured")
	}
	return res, err
}

// Stored makes the snapshot the parent of later captures.
func (m *Machine) Stored(_ context.Context, snapshotID string) error {
	m.p.mu.Lock()
	defer m.p.mu.Unlock()
	m.p.stored = append(m.p.stored, snapshotID)
	return nil
}

// Parent returns the snapshot that the next capture is a difference to.
func (m *Machine) Parent() string { return m.p.parentID() }

func (p *process) parentID() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.stored); n > 0 {
		return p.stored[n-1]
	}
	return p.mapped
}

// forsake forgets a capture that is being deleted.
func (p *process) forsake(snapshotID string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stored = slices.DeleteFunc(p.stored, func(id string) bool { return id == snapshotID })
}

// parentOf reads what the machine was restored from.
func (m *Machine) parentOf(spec engine.CaptureSpec) (string, content, error) {
	id := ""
	if len(spec.Parent) > 0 {
		id = spec.Parent[len(spec.Parent)-1].ID
	}
	if parent := m.p.parentID(); id != parent {
		return "", content{}, errdefs.New(errdefs.ErrInvalid, "its parent is %q, not %q", parent, id)
	}
	if id == "" {
		return "", newContent(time.Time{}), nil
	}
	c, err := readChain(spec.Parent, m.p.shape)
	return id, c, err
}

// freeze stops the guest, copies it, and lets it go on if it shall.
func (m *Machine) freeze(ctx context.Context, after engine.After) (content, error) {
	if err := m.p.run(stop); err != nil {
		return content{}, err
	}
	err := m.d.fault(OpCapture, m.ID())
	if err == nil {
		err = ctx.Err()
	}
	m.p.mu.Lock()
	c := m.p.content.clone()
	m.p.mu.Unlock()
	c.Device.Clock = time.Now().Add(c.Device.offset)
	if err != nil && !errors.Is(err, ErrKilled) || err == nil && after == engine.AfterResume {
		if resumed := m.p.run(goOn); err == nil {
			err = resumed
		}
	}
	return c, err
}

// store writes the artifacts.
func (m *Machine) store(dir, parentID string, now, parent content) (engine.CaptureResult, error) {
	copied, err := writeMemory(filepath.Join(dir, memoryArtifact), parentID, m.p.shape, now, parent)
	if err != nil {
		return engine.CaptureResult{}, err
	}
	if err := m.d.fault(OpWrite, m.ID()); err != nil {
		return engine.CaptureResult{}, err
	}
	files := map[string]string{}
	for name, text := range now.Disk {
		if old, ok := parent.Disk[name]; !ok || old != text {
			files[name] = text
		}
	}
	if err := writeSealed(filepath.Join(dir, diskArtifact), files); err != nil {
		return engine.CaptureResult{}, err
	}
	if err := writeSealed(filepath.Join(dir, deviceArtifact), now.Device); err != nil {
		return engine.CaptureResult{}, err
	}
	res := engine.CaptureResult{CopiedBytes: copied}
	if res.Artifacts, err = listArtifacts(dir); err != nil {
		return engine.CaptureResult{}, err
	}
	for _, a := range res.Artifacts {
		res.LayerBytes += a.Bytes
	}
	return res, nil
}

// listArtifacts measures the artifacts that were written to dir.
func listArtifacts(dir string) ([]engine.Artifact, error) {
	list := []engine.Artifact{
		{Name: memoryArtifact, Kind: "memory", Format: layerfmt.Format},
		{Name: diskArtifact, Kind: "disk", Format: formatDisk},
		{Name: deviceArtifact, Kind: "device", Format: formatDevice},
	}
	for i, a := range list {
		st, err := os.Stat(filepath.Join(dir, a.Name))
		if err != nil {
			return nil, fmt.Errorf("list artifacts: %w", err)
		}
		list[i].Bytes = st.Sys().(*syscall.Stat_t).Blocks * 512
	}
	return list, nil
}

func units(shape engine.Shape) uint64 {
	return uint64(shape.MemoryMiB) << 20 / layerfmt.DefaultUnitSize
}

func writeMemory(path, parentID string, shape engine.Shape, now, parent content) (int64, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, fmt.Errorf("create memory layer: %w", err)
	}
	defer f.Close()
	w, err := layerfmt.NewWriter(f, layerfmt.Header{Units: units(shape), Parent: parentID})
	if err != nil {
		return 0, err
	}
	var keys []string
	for k, c := range now.Memory {
		if old, ok := parent.Memory[k]; !ok || old != c {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b string) int { return cmp.Compare(now.Memory[a].Page, now.Memory[b].Page) })
	for _, k := range keys {
		c := now.Memory[k]
		if err := w.Data(c.Page, encodeCell(k, c.Value)); err != nil {
			return 0, err
		}
	}
	return int64(len(keys)) * layerfmt.DefaultUnitSize, w.Close()
}

// sealed is a JSON value with its checksum.
type sealed struct {
	SHA256 string          `json:"sha256"`
	Value  json.RawMessage `json:"value"`
}

func writeSealed(path string, value any) error {
	b, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode %s: %w", filepath.Base(path), err)
	}
	sum := sha256.Sum256(b)
	b, err = json.Marshal(sealed{SHA256: hex.EncodeToString(sum[:]), Value: b})
	if err != nil {
		return fmt.Errorf("encode %s: %w", filepath.Base(path), err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		return fmt.Errorf("write artifact: %w", err)
	}
	return nil
}

// readSealed is the inverse of writeSealed; ErrCorrupt if the file was changed.
func readSealed(path string, value any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return classify(err)
	}
	var s sealed
	if err := json.Unmarshal(b, &s); err != nil {
		return errdefs.New(errdefs.ErrCorrupt, "%s: %v", filepath.Base(path), err)
	}
	sum := sha256.Sum256(s.Value)
	if hex.EncodeToString(sum[:]) != s.SHA256 {
		return errdefs.New(errdefs.ErrCorrupt, "%s does not match its checksum", filepath.Base(path))
	}
	if err := json.Unmarshal(s.Value, value); err != nil {
		return errdefs.New(errdefs.ErrCorrupt, "%s: %v", filepath.Base(path), err)
	}
	return nil
}

// readChain reads the content that the last state of chain stands for.
func readChain(chain []engine.State, shape engine.Shape) (content, error) {
	c := newContent(time.Time{})
	var readers []*layerfmt.Reader
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	parent := ""
	for _, s := range chain {
		f, err := openArtifact(s, "memory")
		if err != nil {
			return c, err
		}
		files = append(files, f)
		r, err := openLayer(f, parent, shape)
		if err != nil {
			return c, fmt.Errorf("memory layer of %s: %w", s.ID, err)
		}
		readers = append(readers, r)
		if err := readSealed(filepath.Join(s.Dir, diskArtifact), &c.Disk); err != nil {
			return c, fmt.Errorf("disk layer of %s: %w", s.ID, err)
		}
		parent = s.ID
	}
	last := chain[len(chain)-1]
	if err := readSealed(filepath.Join(last.Dir, deviceArtifact), &c.Device); err != nil {
		return c, fmt.Errorf("device state of %s: %w", last.ID, err)
	}
	c.Device.offset = time.Until(c.Device.Clock)
	return c, readPages(files, readers, c.Memory)
}

func openArtifact(s engine.State, kind string) (*os.File, error) {
	for _, a := range s.Artifacts {
		if a.Kind == kind {
			f, err := os.Open(filepath.Join(s.Dir, a.Name))
			return f, classify(err)
		}
	}
	return nil, errdefs.New(errdefs.ErrCorrupt, "snapshot %s has no %s artifact", s.ID, kind)
}

func openLayer(f *os.File, parent string, shape engine.Shape) (*layerfmt.Reader, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	r, err := layerfmt.Open(f, st.Size())
	if err != nil {
		return nil, err
	}
	if h := r.Header(); h.Parent != parent || h.Units != units(shape) {
		return nil, errdefs.New(errdefs.ErrCorrupt, "it is of %d units on %q, not of %d on %q", h.Units, h.Parent, units(shape), parent)
	}
	return r, nil
}

// readPages merges the layers.
func readPages(files []*os.File, readers []*layerfmt.Reader, memory map[string]cell) error {
	ranges, err := layerfmt.Plan(readers)
	if err != nil {
		return err
	}
	page := make([]byte, layerfmt.DefaultUnitSize)
	for _, r := range ranges {
		if r.Layer == layerfmt.ZeroLayer {
			continue
		}
		for i := range r.Count {
			if _, err := files[r.Layer].ReadAt(page, r.Offset+int64(i)*layerfmt.DefaultUnitSize); err != nil {
				return fmt.Errorf("read memory page %d: %w", r.Unit+i, err)
			}
			k, v, err := decodeCell(page)
			if err != nil {
				return err
			}
			memory[k] = cell{Page: r.Unit + i, Value: v}
		}
	}
	return nil
}
