package qemu

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
	"forkd.dev/forkd/internal/linux"
)

var _ engine.Compactor = (*Driver)(nil)

// Names of what Compact makes until all of it is there.
const (
	memoryTemp = memoryArtifact + ".tmp"
	diskTemp   = "disk.tmp"
	mergedDisk = "layer-000.qcow2"
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
	if err := d.compactDisks(ctx, k); err != nil {
		return nil, err
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
func (d *Driver) compactDisks(ctx context.Context, k engine.Compaction) error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for _, s := range k.Chain[k.Keep:] {
		some, err := memimage.OpenArtifacts(s, kindDisk)
		files = append(files, some...)
		if err != nil {
			return err
		}
	}
	out := filepath.Join(k.Dir, diskTemp)
	switch {
	case len(files) == 1 && k.Dir == k.Chain[len(k.Chain)-1].Dir:
		return os.Link(files[0].Name(), out)
	case len(files) == 1:
		return copySparse(out, files[0].Name())
	}
	return d.mergeDisks(ctx, mergeWanted{files: files, out: out, bytes: k.BytesPerSecond})
}

func copyDevice(s engine.State, dir string) error {
	for _, a := range s.Artifacts {
		if a.Kind == kindDevice {
			return copySparse(filepath.Join(dir, deviceArtifact), filepath.Join(s.Dir, a.Name))
		}
	}
	return errors.New("it has no device state")
}

// copySparse copies src to the new file dst, sharing blocks where the file system
// can, and keeping holes.
func copySparse(dst, src string) error {
	in, err := os.Open(src)
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	defer out.Close()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		return nil
	}
	st, err := in.Stat()
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	for off := int64(0); ; {
		start, end, ok, err := linux.NextData(in, off)
		if err != nil {
			return fmt.Errorf("copy: %w", err)
		}
		if !ok {
			break
		}
		if _, err := io.Copy(io.NewOffsetWriter(out, start), io.NewSectionReader(in, start, end-start)); err != nil {
			return fmt.Errorf("copy: %w", err)
		}
		off = end
	}
	if err := out.Truncate(st.Size()); err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	return nil
}
