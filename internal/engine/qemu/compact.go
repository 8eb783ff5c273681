package qemu

import (
	"context"
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

// Compact writes the last state of chain into dir so that it needs no other: its
// memory merged into one layer, its disk layers copied (sharing blocks where the
// file system can). dir may be the directory of the last state: what it held is
// replaced.
func (d *Driver) Compact(ctx context.Context, chain []engine.State, dir string) ([]engine.Artifact, error) {
	last := chain[len(chain)-1]
	memory := filepath.Join(dir, memoryArtifact+".tmp")
	if err := memimage.Merge(ctx, chain, memory); err != nil {
		return nil, fmt.Errorf("compact memory of %s: %w", last.ID, err)
	}
	disks, err := compactDisks(ctx, chain, dir)
	if err != nil {
		return nil, fmt.Errorf("compact disk of %s: %w", last.ID, err)
	}
	if dir != last.Dir {
		if err := copyDevice(last, dir); err != nil {
			return nil, fmt.Errorf("compact %s: %w", last.ID, err)
		}
	}
	if err := os.Rename(memory, filepath.Join(dir, memoryArtifact)); err != nil {
		return nil, fmt.Errorf("compact %s: %w", last.ID, err)
	}
	artifacts, _, err := listArtifacts(dir, disks)
	return artifacts, err
}

// compactDisks gathers the disk layers of all states in dir, lowest first.
func compactDisks(ctx context.Context, chain []engine.State, dir string) ([]string, error) {
	var names []string
	for _, s := range chain {
		for _, a := range s.Artifacts {
			if a.Kind != kindDisk {
				continue
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			name := fmt.Sprintf("layer-%03d.qcow2", len(names))
			names = append(names, name)
			from, to := filepath.Join(s.Dir, a.Name), filepath.Join(dir, name)
			var err error
			if s.Dir == dir {
				err = os.Rename(from, to)
			} else {
				err = copySparse(to, from)
			}
			if err != nil {
				return nil, err
			}
		}
	}
	return names, nil
}

func copyDevice(s engine.State, dir string) error {
	for _, a := range s.Artifacts {
		if a.Kind == kindDevice {
			return copySparse(filepath.Join(dir, deviceArtifact), filepath.Join(s.Dir, a.Name))
		}
	}
	return nil
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
