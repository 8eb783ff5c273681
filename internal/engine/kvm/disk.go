package kvm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/layerfmt/cow1"
	"forkd.dev/forkd/internal/vmmwire"
)

// A machine owns a stack of overlays, normally one. A capture whose source goes on
// puts a new one on top at the pause, and those below become part of the snapshot,
// sharing the files until the snapshot is published. If it never is, the stack
// stays as it is: the next capture takes all of it.

// overlayName is the file of a machine's i-th overlay.
func overlayName(i int) string { return fmt.Sprintf("disk%d.cow1", i) }

// overlayIndex is the inverse of overlayName.
func overlayIndex(name string) int {
	var i int
	_, _ = fmt.Sscanf(strings.TrimSuffix(name, ".cow1"), "disk%d", &i)
	return i
}

// newOverlay creates an empty overlay, replacing what a capture that was given up left.
func newOverlay(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove left overlay: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create overlay: %w", err)
	}
	return f, nil
}

// files collects what goes to a monitor in one message.
type files struct{ list []*os.File }

func (f *files) add(file *os.File) int {
	f.list = append(f.list, file)
	return len(f.list) - 1
}

// open adds the file at path, open for reading.
func (f *files) open(path string) (int, error) {
	file, err := os.Open(path)
	if err != nil {
		return vmmwire.NoFile, err
	}
	return f.add(file), nil
}

func (f *files) close() {
	for _, file := range f.list {
		_ = file.Close()
	}
	f.list = nil
}

// blocks is the length of a machine's disk.
func blocks(shape engine.Shape) uint64 { return uint64(shape.DiskMiB) << 20 / cow1.BlockSize }

// block adds the files of the disk of a machine made from chain, with a new overlay of that
// name on top.
func (f *files) block(spec engine.Spec, chain []engine.State, overlay string) (vmmwire.Device, error) {
	dev := vmmwire.Device{Kind: vmmwire.DeviceBlock, Args: vmmwire.BlockArgs(blocks(spec.Shape))}
	base, err := f.open(spec.Root.Disk)
	if err != nil {
		return dev, fmt.Errorf("open root file system: %w", err)
	}
	dev.Files = append(dev.Files, base)
	for _, s := range chain {
		layers, err := memimage.OpenArtifacts(s, kindDisk)
		for _, l := range layers {
			dev.Files = append(dev.Files, f.add(l))
		}
		if err != nil {
			return dev, err
		}
	}
	top, err := newOverlay(filepath.Join(spec.Dir, overlay))
	if err != nil {
		return dev, err
	}
	dev.Files = append(dev.Files, f.add(top))
	return dev, nil
}
