package control

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/layerfmt/cow1"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/devices/block"
	"forkd.dev/forkd/internal/vmmwire"
)

// durability of disks: a machine does not outlive its host, so that what its guest flushes
// need not either. Who publishes a layer syncs it.
const durability = cow1.SyncProcess

// disk is a block device and the files of its layers, which it owns.
type disk struct {
	*block.Device
	blocks uint64
	files  []*os.File
}

func (d *disk) close() {
	for _, f := range d.files {
		_ = f.Close()
	}
}

// take makes descriptor i of the request the disk's own.
func (d *disk) take(files *Files, i int) (*os.File, error) {
	fd, err := files.Take(i)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "disk")
	d.files = append(d.files, f)
	return f, nil
}

// addBlock makes a disk of the files of vmmwire.BlockArgs and adds it to the machine.
func (s *Server) addBlock(dev vmmwire.Device, files *Files) (err error) {
	d := &disk{}
	defer func() {
		if err != nil {
			d.close()
		}
	}()
	if d.blocks, err = vmmwire.ParseBlockArgs(dev.Args); err != nil {
		return err
	}
	chain, err := d.open(dev, files)
	if err != nil {
		return err
	}
	content, err := cow1.NewDisk(chain)
	if err != nil {
		return err
	}
	if d.Device, err = block.New(block.Config{Disk: content, Clock: devices.NewSystemClock()}); err != nil {
		return err
	}
	if _, err := s.cfg.Machine.AddVirtio(dev.Kind, "disk", d.Device, d.close); err != nil {
		return err
	}
	s.disks = append(s.disks, d)
	return nil
}

// open opens the image, the sealed layers and the new overlay of a disk.
func (d *disk) open(dev vmmwire.Device, files *Files) (c cow1.Chain, err error) {
	if len(dev.Files) < 2 {
		return c, errdefs.New(errdefs.ErrInvalid, "a disk needs an image and an overlay, not %d files", len(dev.Files))
	}
	image, err := d.take(files, dev.Files[0])
	if err != nil {
		return c, err
	}
	c.Base = image
	if c.BaseBytes, err = size(int(image.Fd())); err != nil {
		return c, fmt.Errorf("image of the disk: %w", err)
	}
	for i, at := range dev.Files[1 : len(dev.Files)-1] {
		f, err := d.take(files, at)
		if err != nil {
			return c, err
		}
		n, err := size(int(f.Fd()))
		if err != nil {
			return c, fmt.Errorf("layer %d of the disk: %w", i, err)
		}
		l, err := cow1.Open(f, n)
		if err != nil {
			return c, fmt.Errorf("layer %d of the disk: %w", i, err)
		}
		c.Layers = append(c.Layers, l)
	}
	c.Top, err = d.overlay(files, dev.Files[len(dev.Files)-1])
	return c, err
}

// overlay makes an empty overlay of descriptor i.
func (d *disk) overlay(files *Files, i int) (*cow1.Overlay, error) {
	f, err := d.take(files, i)
	if err != nil {
		return nil, err
	}
	return cow1.Create(overlayFile{f}, cow1.Header{Blocks: d.blocks}, durability)
}

// overlayFile is a file of a disk that can give space back.
type overlayFile struct{ *os.File }

// PunchHole implements cow1.HolePuncher.
func (f overlayFile) PunchHole(off, n int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if err != unix.EINTR {
			return err
		}
	}
}

// nextOverlays makes the overlays that the disks go on with after a capture, in their order; none
// for a machine that ends.
func (s *Server) nextOverlays(list []vmmwire.Device, files *Files) ([]*cow1.Overlay, error) {
	if len(list) != 0 && len(list) != len(s.disks) {
		return nil, errdefs.New(errdefs.ErrInvalid, "overlays for %d of %d disks", len(list), len(s.disks))
	}
	var next []*cow1.Overlay
	for i, dev := range list {
		if dev.Kind != vmmwire.DeviceBlock || len(dev.Files) != 1 {
			return nil, errdefs.New(errdefs.ErrInvalid, "device %d of kind %d with %d files is no overlay", i, dev.Kind, len(dev.Files))
		}
		o, err := s.disks[i].overlay(files, dev.Files[0])
		if err != nil {
			return nil, err
		}
		next = append(next, o)
	}
	return next, nil
}

// seal seals the overlays of all disks of the paused machine, which go on with next.
func (s *Server) seal(next []*cow1.Overlay) error {
	for i, d := range s.disks {
		var err error
		if len(next) == 0 {
			err = d.Disk().Overlay().Seal()
		} else {
			err = d.Freeze(next[i])
		}
		if err != nil {
			return fmt.Errorf("seal disk %d: %w", i, err)
		}
	}
	return nil
}
