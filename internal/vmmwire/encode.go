package vmmwire

import (
	"encoding/binary"
	"time"
)

// Kind implements [Message].
func (m *Hello) Kind() Kind { return KindHello }

func (m *Hello) encode(e *encoder) {
	e.uint(1, m.Version)
	e.bytes(2, []byte(m.Build))
	e.uint(3, uint64(m.State))
	e.uint(4, uint64(m.PID))
	e.bytes(5, []byte(m.ID))
	for _, l := range m.Lost {
		e.entry(6, []byte(l))
	}
}

func (m *Hello) decode(d *decoder, _ int) {
	for d.next() {
		switch d.tag {
		case 1:
			m.Version = d.number(1 << 32)
		case 2:
			m.Build = string(d.text(maxText))
		case 3:
			m.State = State(d.number(uint64(StateEnded)))
		case 4:
			m.PID = int(d.number(1 << 22))
		case 5:
			m.ID = string(d.text(maxID))
		case 6:
			if len(m.Lost) >= MaxDevices {
				d.fail("too many losses")
			}
			m.Lost = append(m.Lost, string(d.text(maxText)))
		}
	}
	d.need(m.Version != 0 && m.State != 0, "version or state")
}

func (e *encoder) shape(tag uint64, s Shape) {
	e.uint(tag, uint64(s.CPUs))
	e.uint(tag+1, uint64(s.MemoryMiB))
}

func (e *encoder) devices(tag uint64, devices []Device) {
	for _, dev := range devices {
		var sub encoder
		sub.uint(1, uint64(dev.Kind))
		for _, f := range dev.Files {
			sub.file(2, f)
		}
		sub.bytes(3, dev.Args)
		e.entry(tag, sub.b)
	}
}

func (d *decoder) device(files int) (dev Device) {
	sub := decoder{b: d.text(MaxMessage)}
	for sub.next() {
		switch sub.tag {
		case 1:
			dev.Kind = DeviceKind(sub.number(uint64(deviceKindEnd - 1)))
		case 2:
			if len(dev.Files) >= MaxFiles {
				sub.fail("too many files")
			}
			dev.Files = append(dev.Files, sub.file(files))
		case 3:
			dev.Args = append([]byte(nil), sub.text(maxDeviceArgs)...)
		}
	}
	sub.need(dev.Kind != 0, "kind of a device")
	if sub.err != nil {
		d.fail("device: %w", sub.err)
	}
	return dev
}

func (d *decoder) appendDevice(list []Device, files int) []Device {
	if len(list) >= MaxDevices {
		d.fail("more than %d devices", MaxDevices)
		return list
	}
	return append(list, d.device(files))
}

func (d *decoder) checkShape(s Shape) {
	if s.CPUs < 1 || s.CPUs > MaxCPUs || s.MemoryMiB < 1 || s.MemoryMiB > MaxMemoryMiB {
		d.fail("a machine of %d CPUs and %d MiB: 1 to %d and 1 to %d are possible", s.CPUs, s.MemoryMiB, MaxCPUs, MaxMemoryMiB)
	}
}

// Kind implements [Message].
func (m *Boot) Kind() Kind { return KindBoot }

func (m *Boot) encode(e *encoder) {
	e.bytes(1, []byte(m.ID))
	e.shape(2, m.Shape)
	e.file(4, m.Kernel)
	e.file(5, m.Initrd)
	e.bytes(6, []byte(m.Cmdline))
	e.devices(7, m.Devices)
	e.flag(8, m.Paused)
	e.flag(9, m.LowestCPU)
}

func (m *Boot) decode(d *decoder, files int) {
	m.Kernel, m.Initrd = NoFile, NoFile
	for d.next() {
		switch d.tag {
		case 1:
			m.ID = string(d.text(maxID))
		case 2:
			m.Shape.CPUs = int(d.number(MaxCPUs))
		case 3:
			m.Shape.MemoryMiB = int(d.number(MaxMemoryMiB))
		case 4:
			m.Kernel = d.file(files)
		case 5:
			m.Initrd = d.file(files)
		case 6:
			m.Cmdline = string(d.text(maxCmdline))
		case 7:
			m.Devices = d.appendDevice(m.Devices, files)
		case 8:
			m.Paused = d.number(1) == 1
		case 9:
			m.LowestCPU = d.number(1) == 1
		}
	}
	d.checkShape(m.Shape)
	d.need(m.Kernel != NoFile, "kernel")
}

// memory writes ranges as one field: of each, the gap to the one before, the count,
// the descriptor and the page of the offset.
func (e *encoder) memory(tag uint64, m Memory) {
	var b []byte
	end := uint64(0)
	for _, r := range m.Ranges {
		b = binary.AppendUvarint(b, r.Page-end)
		b = binary.AppendUvarint(b, r.Count)
		b = binary.AppendUvarint(b, uint64(r.File+1))
		b = binary.AppendUvarint(b, r.Offset/PageSize)
		end = r.Page + r.Count
	}
	e.bytes(tag, b)
}

// PageSize is the unit of ranges.
const PageSize = 4096

const maxPages = MaxMemoryMiB << 20 / PageSize

func (d *decoder) memory(files int) (m Memory) {
	sub := decoder{b: d.text(MaxMessage)}
	end := uint64(0)
	for len(sub.b) > 0 && sub.err == nil {
		if len(m.Ranges) >= MaxRanges {
			sub.fail("more than %d ranges", MaxRanges)
		}
		gap, count, file, page := sub.uvarint(), sub.uvarint(), sub.uvarint(), sub.uvarint()
		if gap > maxPages || count == 0 || count > maxPages || file > uint64(files) || page > 1<<50 {
			sub.fail("range of %d pages after %d, descriptor %d of %d, page %d of it", count, gap, file, files, page)
		}
		r := Range{Page: end + gap, Count: count, File: int(file) - 1, Offset: page * PageSize}
		if end = r.Page + r.Count; end > maxPages {
			sub.fail("range ends at page %d", end)
		}
		m.Ranges = append(m.Ranges, r)
	}
	if sub.err != nil {
		d.fail("memory: %w", sub.err)
	}
	return m
}

// checkMemory makes sure that the plan fits into the shape.
func (d *decoder) checkMemory(m Memory, s Shape) {
	if n := len(m.Ranges); n > 0 {
		last := m.Ranges[n-1]
		if have := uint64(s.MemoryMiB) << 20 / PageSize; last.Page+last.Count > have {
			d.fail("memory plan ends at page %d of %d", last.Page+last.Count, have)
		}
	}
}

// Kind implements [Message].
func (m *Restore) Kind() Kind { return KindRestore }

func (m *Restore) encode(e *encoder) {
	e.bytes(1, []byte(m.ID))
	e.shape(2, m.Shape)
	e.memory(4, m.Memory)
	e.file(5, m.State)
	e.devices(6, m.Devices)
	e.flag(7, m.Run)
	if m.Generation != [16]byte{} {
		e.bytes(8, m.Generation[:])
	}
}

func (m *Restore) decode(d *decoder, files int) {
	m.State = NoFile
	for d.next() {
		switch d.tag {
		case 1:
			m.ID = string(d.text(maxID))
		case 2:
			m.Shape.CPUs = int(d.number(MaxCPUs))
		case 3:
			m.Shape.MemoryMiB = int(d.number(MaxMemoryMiB))
		case 4:
			m.Memory = d.memory(files)
		case 5:
			m.State = d.file(files)
		case 6:
			m.Devices = d.appendDevice(m.Devices, files)
		case 7:
			m.Run = d.number(1) == 1
		case 8:
			copy(m.Generation[:], d.text(len(m.Generation)))
		}
	}
	d.checkShape(m.Shape)
	d.checkMemory(m.Memory, m.Shape)
	d.need(m.State != NoFile, "state")
}

// Kind implements [Message].
func (m *Rollback) Kind() Kind { return KindRollback }

func (m *Rollback) encode(e *encoder) {
	e.memory(1, m.Memory)
	e.file(2, m.State)
	e.devices(3, m.Devices)
	e.flag(4, m.Run)
	e.flag(5, m.ToLast)
	if m.Generation != [16]byte{} {
		e.bytes(6, m.Generation[:])
	}
}

func (m *Rollback) decode(d *decoder, files int) {
	m.State = NoFile
	for d.next() {
		switch d.tag {
		case 1:
			m.Memory = d.memory(files)
		case 2:
			m.State = d.file(files)
		case 3:
			m.Devices = d.appendDevice(m.Devices, files)
		case 4:
			m.Run = d.number(1) == 1
		case 5:
			m.ToLast = d.number(1) == 1
		case 6:
			copy(m.Generation[:], d.text(len(m.Generation)))
		}
	}
	d.need(m.State != NoFile, "state")
}

// Kind implements [Message].
func (m *CaptureBegin) Kind() Kind { return KindCaptureBegin }

func (m *CaptureBegin) encode(e *encoder) {
	e.file(1, m.Pages)
	e.file(2, m.Index)
	e.uint(3, m.MaxPages)
	e.flag(4, m.Everything)
	e.flag(5, m.NoCopy)
}

func (m *CaptureBegin) decode(d *decoder, files int) {
	m.Pages, m.Index = NoFile, NoFile
	for d.next() {
		switch d.tag {
		case 1:
			m.Pages = d.file(files)
		case 2:
			m.Index = d.file(files)
		case 3:
			m.MaxPages = d.number(maxPages)
		case 4:
			m.Everything = d.number(1) == 1
		case 5:
			m.NoCopy = d.number(1) == 1
		}
	}
	d.need(m.Pages != NoFile && m.Index != NoFile && m.MaxPages != 0, "pages or index")
}

// Kind implements [Message].
func (m *CaptureEnd) Kind() Kind { return KindCaptureEnd }

func (m *CaptureEnd) encode(e *encoder) {
	e.file(1, m.State)
	e.flag(2, m.Run)
	e.devices(3, m.Devices)
}

func (m *CaptureEnd) decode(d *decoder, files int) {
	m.State = NoFile
	for d.next() {
		switch d.tag {
		case 1:
			m.State = d.file(files)
		case 2:
			m.Run = d.number(1) == 1
		case 3:
			m.Devices = d.appendDevice(m.Devices, files)
		}
	}
	d.need(m.State != NoFile, "state")
}

// Kind implements [Message].
func (m *Captured) Kind() Kind { return KindCaptured }

func (m *Captured) encode(e *encoder) {
	e.uint(1, m.Pages)
	e.uint(2, m.Runs)
	e.uint(3, m.CopiedPages)
	e.uint(4, m.Rounds)
	e.uint(5, uint64(m.Pause))
	e.uint(6, m.StateBytes)
}

const maxNanoseconds = 1 << 62

func (m *Captured) decode(d *decoder, _ int) {
	for d.next() {
		switch d.tag {
		case 1:
			m.Pages = d.number(maxPages)
		case 2:
			m.Runs = d.number(maxPages)
		case 3:
			m.CopiedPages = d.number(maxPages)
		case 4:
			m.Rounds = d.number(1 << 20)
		case 5:
			m.Pause = time.Duration(d.number(maxNanoseconds))
		case 6:
			m.StateBytes = d.number(1 << 40)
		}
	}
}

// Kind implements [Message].
func (m *Stats) Kind() Kind { return KindStatsReply }

func (m *Stats) encode(e *encoder) {
	e.uint(1, uint64(m.State))
	e.uint(2, m.Exits)
	e.uint(3, m.PrivatePages)
	e.uint(4, uint64(m.CPU))
	e.bytes(5, []byte(m.Waiting))
}

func (m *Stats) decode(d *decoder, _ int) {
	for d.next() {
		switch d.tag {
		case 1:
			m.State = State(d.number(uint64(StateEnded)))
		case 2:
			m.Exits = d.number(1 << 63)
		case 3:
			m.PrivatePages = d.number(maxPages)
		case 4:
			m.CPU = time.Duration(d.number(maxNanoseconds))
		case 5:
			m.Waiting = string(d.text(maxText))
		}
	}
}

// Kind implements [Message].
func (m *Failed) Kind() Kind { return KindFailed }

func (m *Failed) encode(e *encoder) {
	e.bytes(1, []byte(m.Code))
	e.bytes(2, []byte(m.Text[:min(len(m.Text), maxText)]))
}

func (m *Failed) decode(d *decoder, _ int) {
	for d.next() {
		switch d.tag {
		case 1:
			m.Code = string(d.text(maxID))
		case 2:
			m.Text = string(d.text(maxText))
		}
	}
}

// Kind implements [Message].
func (m *Ended) Kind() Kind { return KindEnded }

func (m *Ended) encode(e *encoder) {
	e.bytes(1, []byte(m.Reason[:min(len(m.Reason), maxText)]))
	e.flag(2, m.Guest)
}

func (m *Ended) decode(d *decoder, _ int) {
	for d.next() {
		switch d.tag {
		case 1:
			m.Reason = string(d.text(maxText))
		case 2:
			m.Guest = d.number(1) == 1
		}
	}
}
