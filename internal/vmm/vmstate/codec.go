package vmstate

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"forkd.dev/forkd/internal/errdefs"
)

const (
	magic     = "FORKDVMS"
	version   = 1
	headerLen = 32
	entryLen  = 24
	alignment = 16
	// A machine has at most so many sections.
	maxSections = 3 + irqChips + MaxCPUs*(Items+1) + MaxDevices
)

// Kinds of sections, in the order of the file.
const (
	kindMachine = 1 + iota
	kindCPUID
	kindClock
	kindIRQChip // index: number of the controller
	kindItem    // index: vCPU * Items + item
	kindMSRs    // index: vCPU
	kindDevice  // index: position; content: kind, state
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type section struct {
	kind, index uint32
	data        []byte
}

// check tells whether s can be written and read back.
func (s *State) check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrContent, fmt.Sprintf(format, args...))
	}
	switch {
	case len(s.CPUs) < 1 || len(s.CPUs) > MaxCPUs:
		return bad("%d vCPUs", len(s.CPUs))
	case len(s.Devices) > MaxDevices:
		return bad("%d devices", len(s.Devices))
	case s.MemoryMiB < 1 || s.MemoryMiB > maxMemoryMiB:
		return bad("%d MiB of memory", s.MemoryMiB)
	case len(s.CPUID)%cpuidLen != 0 || len(s.CPUID) > maxCPUID*cpuidLen:
		return bad("CPUID of %d bytes", len(s.CPUID))
	case len(s.Clock) != clockLen:
		return bad("clock of %d bytes", len(s.Clock))
	case len(s.IRQChips) != irqChips:
		return bad("%d interrupt controllers", len(s.IRQChips))
	}
	for i, c := range s.IRQChips {
		if len(c) != irqChipLen {
			return bad("interrupt controller %d of %d bytes", i, len(c))
		}
	}
	for i, c := range s.CPUs {
		if len(c.MSRs)%msrLen != 0 || len(c.MSRs) > maxMSRs*msrLen {
			return bad("vCPU %d has %d bytes of MSRs", i, len(c.MSRs))
		}
		for j, item := range c.Items {
			if len(item) == 0 || len(item) > maxItem {
				return bad("item %d of vCPU %d has %d bytes", j, i, len(item))
			}
		}
	}
	for i, d := range s.Devices {
		if len(d.State) > maxDevice {
			return bad("device %d has %d bytes", i, len(d.State))
		}
	}
	return nil
}

func (s *State) sections() []section {
	le := binary.LittleEndian
	m := make([]byte, machineLen)
	le.PutUint32(m, uint32(len(s.CPUs)))
	le.PutUint32(m[4:], uint32(s.MemoryMiB))
	le.PutUint64(m[8:], s.TSCkHz)
	le.PutUint32(m[16:], uint32(len(s.Devices)))
	out := []section{{kindMachine, 0, m}, {kindCPUID, 0, s.CPUID}, {kindClock, 0, s.Clock}}
	for i, c := range s.IRQChips {
		out = append(out, section{kindIRQChip, uint32(i), c})
	}
	for i, c := range s.CPUs {
		for j, item := range c.Items {
			out = append(out, section{kindItem, uint32(i*Items + j), item})
		}
	}
	for i, c := range s.CPUs {
		out = append(out, section{kindMSRs, uint32(i), c.MSRs})
	}
	for i, d := range s.Devices {
		out = append(out, section{kindDevice, uint32(i), append(le.AppendUint32(nil, d.Kind), d.State...)})
	}
	return out
}

func align(n int) int { return (n + alignment - 1) &^ (alignment - 1) }

// Encode returns the file. ErrInvalid: s is not a state that Decode would accept.
func Encode(s *State) ([]byte, error) {
	if err := s.check(); err != nil {
		return nil, errdefs.New(errdefs.ErrInvalid, "encode machine state: %v", err)
	}
	sections := s.sections()
	le := binary.LittleEndian
	offset := align(headerLen + len(sections)*entryLen)
	total := offset
	for _, sec := range sections {
		total += align(len(sec.data))
	}
	b := make([]byte, total)
	copy(b, magic)
	le.PutUint32(b[8:], version)
	le.PutUint32(b[12:], uint32(len(sections)))
	le.PutUint64(b[16:], uint64(total))
	for i, sec := range sections {
		e := b[headerLen+i*entryLen:]
		le.PutUint32(e, sec.kind)
		le.PutUint32(e[4:], sec.index)
		le.PutUint64(e[8:], uint64(offset))
		le.PutUint64(e[16:], uint64(len(sec.data)))
		copy(b[offset:], sec.data)
		offset += align(len(sec.data))
	}
	if total > MaxBytes {
		return nil, errdefs.New(errdefs.ErrInvalid, "encode machine state: %d bytes", total)
	}
	le.PutUint32(b[24:], crc32.Checksum(b[headerLen:], castagnoli))
	return b, nil
}

// Decode reads a file. The order of its checks matters: another version may keep its
// checksum elsewhere.
func Decode(b []byte) (*State, error) {
	le := binary.LittleEndian
	if len(b) >= len(magic) && string(b[:len(magic)]) != magic {
		return nil, ErrMagic
	}
	if len(b) < headerLen || len(b) > MaxBytes {
		return nil, fmt.Errorf("%w: %d bytes", ErrSize, len(b))
	}
	if v := le.Uint32(b[8:]); v != version {
		return nil, fmt.Errorf("%w: it is %d, this build reads %d", ErrVersion, v, version)
	}
	if n := le.Uint64(b[16:]); n != uint64(len(b)) {
		return nil, fmt.Errorf("%w: %d bytes, the header says %d", ErrSize, len(b), n)
	}
	if crc32.Checksum(b[headerLen:], castagnoli) != le.Uint32(b[24:]) {
		return nil, ErrChecksum
	}
	sections, err := readTable(b)
	if err != nil {
		return nil, err
	}
	s, err := fromSections(sections)
	if err != nil {
		return nil, err
	}
	return s, s.check()
}

// readTable checks that sections follow each other without gaps up to the end.
func readTable(b []byte) ([]section, error) {
	le := binary.LittleEndian
	n := le.Uint32(b[12:])
	if n > maxSections || le.Uint32(b[28:]) != 0 || headerLen+int(n)*entryLen > len(b) {
		return nil, fmt.Errorf("%w: %d sections", ErrContent, n)
	}
	offset := align(headerLen + int(n)*entryLen)
	out := make([]section, 0, n)
	for i := range int(n) {
		e := b[headerLen+i*entryLen:]
		start, length := le.Uint64(e[8:]), le.Uint64(e[16:])
		if start != uint64(offset) || length > uint64(len(b)) || offset+align(int(length)) > len(b) {
			return nil, fmt.Errorf("%w: section %d has %d bytes at %d", ErrContent, i, length, start)
		}
		out = append(out, section{le.Uint32(e), le.Uint32(e[4:]), b[offset : offset+int(length) : offset+int(length)]})
		offset += align(int(length))
	}
	if offset != len(b) {
		return nil, fmt.Errorf("%w: %d bytes after the last section", ErrContent, len(b)-offset)
	}
	return out, nil
}

// fromSections takes the sections one by one in their only order.
func fromSections(sections []section) (*State, error) {
	var err error
	take := func(kind, index uint32) []byte {
		if len(sections) == 0 || sections[0].kind != kind || sections[0].index != index {
			if err == nil {
				err = fmt.Errorf("%w: section %d/%d is missing", ErrContent, kind, index)
			}
			return nil
		}
		data := sections[0].data
		sections = sections[1:]
		return data
	}
	le := binary.LittleEndian
	m := take(kindMachine, 0)
	if len(m) != machineLen {
		return nil, fmt.Errorf("%w: machine section of %d bytes", ErrContent, len(m))
	}
	cpus, devices := le.Uint32(m), le.Uint32(m[16:])
	if cpus > MaxCPUs || devices > MaxDevices {
		return nil, fmt.Errorf("%w: %d vCPUs, %d devices", ErrContent, cpus, devices)
	}
	s := &State{MemoryMiB: int(le.Uint32(m[4:])), TSCkHz: le.Uint64(m[8:]), CPUID: take(kindCPUID, 0), Clock: take(kindClock, 0)}
	for i := range uint32(irqChips) {
		s.IRQChips = append(s.IRQChips, take(kindIRQChip, i))
	}
	s.CPUs = make([]CPU, cpus)
	for i := range s.CPUs {
		for j := range s.CPUs[i].Items {
			s.CPUs[i].Items[j] = take(kindItem, uint32(i*Items+j))
		}
	}
	for i := range s.CPUs {
		s.CPUs[i].MSRs = take(kindMSRs, uint32(i))
	}
	for i := range devices {
		d := take(kindDevice, i)
		if err == nil && len(d) < deviceKindLen {
			return nil, fmt.Errorf("%w: device %d has %d bytes", ErrContent, i, len(d))
		}
		if err == nil {
			s.Devices = append(s.Devices, Device{Kind: le.Uint32(d), State: d[deviceKindLen:]})
		}
	}
	if err == nil && len(sections) > 0 {
		err = fmt.Errorf("%w: %d sections too many", ErrContent, len(sections))
	}
	return s, err
}
