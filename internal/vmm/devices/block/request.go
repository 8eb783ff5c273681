package block

import (
	"encoding/binary"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/devices"
	"forkd.dev/forkd/internal/vmm/virtio"
)

// Types of requests and their results (5.2.6).
const (
	typeIn          = 0
	typeOut         = 1
	typeFlush       = 4
	typeGetID       = 8
	typeDiscard     = 11
	typeWriteZeroes = 13

	statusOK          = 0
	statusIOError     = 1
	statusUnsupported = 2

	headerLen = 16
	rangeLen  = 16
	flagUnmap = 1
)

var (
	errHeader = errdefs.New(errdefs.ErrGuest, "disk request without a whole header")
	errStatus = errdefs.New(errdefs.ErrGuest, "disk request without a byte for its status")
	errRange  = errdefs.New(errdefs.ErrGuest, "disk request is not whole sectors inside of the disk")
	errLength = errdefs.New(errdefs.ErrGuest, "disk request of a length that its type does not allow")
)

// handle does the request in c and returns how many bytes of its writable part were
// filled. An error means that c is no request.
func (d *Device) handle(c *virtio.Chain) (uint32, error) {
	var header [headerLen]byte
	if devices.Gather(header[:], c.Readable) != headerLen {
		return 0, errHeader
	}
	if c.WriteLen == 0 {
		return 0, errStatus
	}
	le := binary.LittleEndian
	r := request{
		kind:   le.Uint32(header[:]),
		sector: le.Uint64(header[8:]),
		out:    devices.Skip(c.Readable, headerLen),
		in:     c.Writable,
		outLen: c.ReadLen - headerLen,
		inLen:  c.WriteLen - 1,
	}
	// The last byte is the status; the rest is for data.
	last := r.in[len(r.in)-1]
	status := last[len(last)-1:]
	r.in[len(r.in)-1] = last[:len(last)-1]

	written, err := d.do(&r)
	status[0] = d.result(err)
	return written + 1, nil
}

type request struct {
	kind          uint32
	sector        uint64
	out, in       [][]byte
	outLen, inLen uint64
}

var errUnsupported = errdefs.New(errdefs.ErrUnsupported, "unknown type of disk request")

func (d *Device) do(r *request) (written uint32, err error) {
	switch r.kind {
	case typeIn:
		return d.read(r)
	case typeOut:
		return 0, d.write(r)
	case typeFlush:
		d.flushes.Add(1)
		return 0, d.disk.Flush()
	case typeGetID:
		return d.identify(r), nil
	case typeDiscard, typeWriteZeroes:
		d.writes.Add(1)
		return 0, d.clear(r)
	}
	return 0, errUnsupported
}

// result turns the outcome into the status byte and reports what the host is to blame for.
func (d *Device) result(err error) byte {
	if err == nil {
		return statusOK
	}
	d.failed.Add(1)
	if err == errUnsupported {
		return statusUnsupported
	}
	if err != errRange && err != errLength && d.cfg.OnError != nil {
		if d.errors.Wait(d.cfg.Clock.Now()) == 0 {
			d.errors.Use(1)
			d.cfg.OnError(fmt.Errorf("disk: %w", err))
		}
	}
	return statusIOError
}

// place checks that length bytes from the request's sector on are in the disk.
func (d *Device) place(sector, length uint64) (int64, error) {
	sectors := uint64(d.disk.Bytes()) / SectorSize
	if length%SectorSize != 0 || sector > sectors || length/SectorSize > sectors-sector {
		return 0, errRange
	}
	return int64(sector * SectorSize), nil
}

func (d *Device) read(r *request) (written uint32, err error) {
	off, err := d.place(r.sector, r.inLen)
	if err != nil {
		return 0, err
	}
	if r.inLen > maxTransfer {
		return 0, errLength
	}
	d.reads.Add(1)
	for _, b := range r.in {
		if err := d.disk.ReadAt(b, off); err != nil {
			return written, err
		}
		off += int64(len(b))
		written += uint32(len(b))
	}
	d.readBytes.Add(r.inLen)
	return written, nil
}

func (d *Device) write(r *request) error {
	off, err := d.place(r.sector, r.outLen)
	if err != nil {
		return err
	}
	if r.outLen > maxTransfer {
		return errLength
	}
	d.writes.Add(1)
	for _, b := range r.out {
		if err := d.disk.WriteAt(b, off); err != nil {
			return err
		}
		off += int64(len(b))
	}
	d.writtenBytes.Add(r.outLen)
	return nil
}

func (d *Device) identify(r *request) uint32 {
	var id [idLen]byte
	copy(id[:], d.cfg.ID)
	return uint32(devices.Scatter(r.in, id[:]))
}

// clear does discard and write-zeroes. Both leave zeros.
func (d *Device) clear(r *request) error {
	var seg [rangeLen]byte
	if r.outLen != rangeLen*maxSegments {
		return errLength
	}
	devices.Gather(seg[:], r.out)
	le := binary.LittleEndian
	sector, count, flags := le.Uint64(seg[:]), uint64(le.Uint32(seg[8:])), le.Uint32(seg[12:])
	if flags&^flagUnmap != 0 || (r.kind == typeDiscard && flags != 0) {
		return errUnsupported
	}
	if count > maxRange {
		return errLength
	}
	off, err := d.place(sector, count*SectorSize)
	if err != nil {
		return err
	}
	if r.kind == typeDiscard {
		return d.disk.Discard(off, int64(count*SectorSize))
	}
	return d.disk.Zero(off, int64(count*SectorSize))
}
