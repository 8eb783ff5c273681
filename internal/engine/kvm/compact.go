package kvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt/cow1"
	"forkd.dev/forkd/internal/linux"
)

var _ engine.Compactor = (*Driver)(nil)

// Names of what Compact makes until all of it is there.
const (
	memoryTemp = memoryArtifact + ".tmp"
	diskTemp   = "disk.tmp"
	mergedDisk = "layer-000.cow1"
)

// Compact merges the layers of a state with those of its ancestors that do not stay:
// memory into one layer, disk into one. What is in k.Dir changes only at the end.
func (d *Driver) Compact(ctx context.Context, k engine.Compaction) (_ []engine.Artifact, err error) {
	last := k.Chain[len(k.Chain)-1]
	defer func() {
		if err != nil {
			err = fmt.Errorf("compact %s: %w", last.ID, err)
			for _, name := range []string{memoryTemp, diskTemp} {
				_ = os.Remove(filepath.Join(k.Dir, name))
			}
		}
	}()
	if err := memimage.Merge(ctx, k, filepath.Join(k.Dir, memoryTemp)); err != nil {
		return nil, fmt.Errorf("merge memory: %w", err)
	}
	if err := compactDisks(ctx, k); err != nil {
		return nil, fmt.Errorf("merge disk: %w", err)
	}
	if k.Dir == last.Dir {
		for _, a := range last.Artifacts {
			if a.Kind == kindDisk {
				if err := os.Remove(filepath.Join(k.Dir, a.Name)); err != nil {
					return nil, err
				}
			}
		}
	} else if err := copyDevice(last, k.Dir); err != nil {
		return nil, err
	}
	if err := os.Rename(filepath.Join(k.Dir, memoryTemp), filepath.Join(k.Dir, memoryArtifact)); err != nil {
		return nil, err
	}
	if err := os.Rename(filepath.Join(k.Dir, diskTemp), filepath.Join(k.Dir, mergedDisk)); err != nil {
		return nil, err
	}
	artifacts, _, err := listArtifacts(k.Dir, []string{mergedDisk})
	return artifacts, err
}

// compactDisks merges the disk layers of all states that do not stay into one.
func compactDisks(ctx context.Context, k engine.Compaction) error {
	var list []*os.File
	defer func() {
		for _, f := range list {
			_ = f.Close()
		}
	}()
	for _, s := range k.Chain[k.Keep:] {
		some, err := memimage.OpenArtifacts(s, kindDisk)
		list = append(list, some...)
		if err != nil {
			return err
		}
	}
	parent := ""
	if k.Keep > 0 {
		parent = k.Chain[k.Keep-1].ID
	}
	return mergeDisks(ctx, diskMerge{files: list, parent: parent, out: filepath.Join(k.Dir, diskTemp), bytesPerSecond: k.BytesPerSecond})
}

// diskMerge is a merge of disk layers, the lowest first, to a new file.
type diskMerge struct {
	files          []*os.File
	parent         string
	out            string
	bytesPerSecond int64
}

func mergeDisks(ctx context.Context, m diskMerge) (err error) {
	limit := memimage.NewThrottle(m.bytesPerSecond)
	var layers []*cow1.Layer
	for _, f := range m.files {
		st, err := f.Stat()
		if err != nil {
			return err
		}
		l, err := cow1.Open(throttled{ctx, f, limit}, st.Size())
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}
		layers = append(layers, l)
	}
	if len(layers) == 0 {
		return errdefs.New(errdefs.ErrInvalid, "there are no disk layers to merge")
	}
	out, err := os.OpenFile(m.out, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, out.Close()); err != nil {
			_ = os.Remove(m.out)
		}
	}()
	_, err = cow1.Merge(ctx, out, cow1.Header{Blocks: layers[0].Header().Blocks, Parent: m.parent}, layers)
	return err
}

// throttled is a file that is read no faster than a limit.
type throttled struct {
	ctx   context.Context
	f     *os.File
	limit *memimage.Throttle
}

// ReadAt implements io.ReaderAt.
func (t throttled) ReadAt(p []byte, off int64) (int, error) {
	if err := t.limit.Wait(t.ctx, int64(len(p))); err != nil {
		return 0, err
	}
	return t.f.ReadAt(p, off)
}

func copyDevice(s engine.State, dir string) error {
	in, err := memimage.OpenArtifact(s, kindDevice)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(filepath.Join(dir, deviceArtifact), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) != nil {
		_, err = io.Copy(out, in)
	}
	return errors.Join(err, out.Close())
}

var _ engine.StateChecker = (*Driver)(nil)

// CheckState looks at a state that somebody else made. Memory layers are checked by
// the store, device state by the monitor, which reads it confined; here it is the disk.
func (d *Driver) CheckState(s engine.State, shape engine.Shape) error {
	kinds := map[string]string{kindMemory: formatLayer, kindDisk: formatCow, kindDevice: formatState}
	for _, a := range s.Artifacts {
		if want, ok := kinds[a.Kind]; !ok || a.Format != want {
			return errdefs.New(errdefs.ErrCorrupt, "artifact %s of %s is a %.40q of format %.40q", a.Name, s.ID, a.Kind, a.Format)
		}
	}
	list, err := memimage.OpenArtifacts(s, kindDisk)
	defer func() {
		for _, f := range list {
			_ = f.Close()
		}
	}()
	if err != nil {
		return err
	}
	for _, f := range list {
		if err := checkDisk(f, shape); err != nil {
			return errdefs.New(errdefs.ErrCorrupt, "disk layer of %s: %w", s.ID, err)
		}
	}
	return nil
}

func checkDisk(f *os.File, shape engine.Shape) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	l, err := cow1.Open(f, st.Size())
	if err != nil {
		return err
	}
	if got := l.Header().Blocks; got != blocks(shape) {
		return fmt.Errorf("it is of a disk with %d blocks, not %d", got, blocks(shape))
	}
	return l.Verify(context.Background())
}

var _ engine.MemoryMeter = (*Driver)(nil)

// OccupiedKiB sums what the machines wrote and the memory files they share. A machine that ends
// meanwhile counts nothing.
func (d *Driver) OccupiedKiB() (int64, error) {
	total := d.images.OccupiedKiB()
	for _, m := range d.all() {
		kib, err := linux.ReadPrivateKiB(m.rec.PID)
		if errors.Is(err, errdefs.ErrNotFound) {
			continue
		}
		if err != nil {
			return 0, err
		}
		total += kib
	}
	return total, nil
}

var _ engine.ResidentKeeper = (*Driver)(nil)

// Residents lists the memory files that are kept, the largest first.
func (d *Driver) Residents() []engine.Resident { return d.images.List(d.mapped()) }
