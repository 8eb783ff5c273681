package qemu

import (
	"encoding/binary"
	"fmt"
	"io"

	"forkd.dev/forkd/internal/engine"
	"forkd.dev/forkd/internal/engine/memimage"
	"forkd.dev/forkd/internal/errdefs"
)

var _ engine.StateChecker = (*Driver)(nil)

// Fields of a qcow2 header, see QEMU's docs/interop/qcow2.txt.
const (
	qcowDirty = 1 << 0 // the only incompatible feature that is no danger
)

// CheckState looks at a state that somebody else made. Memory layers are checked by
// the store; here it is the disk layers, whose format can name other files. (QEMU
// could not open them: it runs in an empty root. This is the first of two walls.)
func (d *Driver) CheckState(s engine.State, shape engine.Shape) error {
	kinds := map[string]string{kindMemory: formatLayer, kindDisk: formatQcow2, kindDevice: formatXen}
	for _, a := range s.Artifacts {
		if want, ok := kinds[a.Kind]; !ok || a.Format != want {
			return errdefs.New(errdefs.ErrCorrupt, "artifact %s of %s is a %.40q of format %.40q", a.Name, s.ID, a.Kind, a.Format)
		}
	}
	files, err := memimage.OpenArtifacts(s, kindDisk)
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := checkQcow2(f, int64(shape.DiskMiB)<<20); err != nil {
			return errdefs.New(errdefs.ErrCorrupt, "disk layer of %s: %w", s.ID, err)
		}
	}
	return nil
}

// checkQcow2 accepts what our overlays can become, and nothing else.
func checkQcow2(r io.ReaderAt, size int64) error {
	head := make([]byte, qcowHeaderBytes)
	if _, err := r.ReadAt(head, 0); err != nil {
		return fmt.Errorf("read header: %w", err)
	}
	be := binary.BigEndian
	u32, u64 := func(at int) uint32 { return be.Uint32(head[at:]) }, func(at int) uint64 { return be.Uint64(head[at:]) }
	switch {
	case u32(0) != qcowMagic || u32(4) != 3:
		return fmt.Errorf("it is no qcow2 file of version 3")
	case u64(8) != 0 || u32(16) != 0:
		return fmt.Errorf("it names a backing file")
	case u32(20) != qcowClusterBits:
		return fmt.Errorf("its clusters have 2^%d bytes, not 2^%d", u32(20), qcowClusterBits)
	case u64(24) != uint64(size):
		return fmt.Errorf("it is of a disk with %d bytes, not %d", u64(24), size)
	case u32(32) != 0:
		return fmt.Errorf("it is encrypted")
	case u32(60) != 0:
		return fmt.Errorf("it holds %d snapshots of its own", u32(60))
	case u64(72)&^qcowDirty != 0:
		return fmt.Errorf("it has the features %#x: an external data file, for example", u64(72))
	}
	return nil
}
