package arch

import (
	"encoding/binary"
	"fmt"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/kvm"
	"forkd.dev/forkd/internal/vmm/memory"
)

// Boot says what is put into a fresh memory.
type Boot struct {
	Kernel   File
	Initrd   *File // nil: none
	Cmdline  string
	Firmware Firmware
	Memory   uint64 // bytes
	UsePVH   bool
}

// Entry is how the first processor starts.
type Entry struct {
	protocol protocol
	address  uint64
}

const maxCmdline = 2047

// Load puts kernel, initial RAM disk, command line, memory map and firmware tables into
// guest memory.
func Load(g memory.Guest, b Boot) (Entry, error) {
	if len(b.Cmdline) > maxCmdline {
		return Entry{}, errdefs.New(errdefs.ErrInvalid, "boot: a command line of %d bytes", len(b.Cmdline))
	}
	img, err := loadKernel(g, b.Kernel, b.UsePVH)
	if err != nil {
		return Entry{}, err
	}
	rd, err := loadInitrd(g, b, img.end)
	if err != nil {
		return Entry{}, err
	}
	if err := g.WriteAt(append([]byte(b.Cmdline), 0), cmdlineAddress); err != nil {
		return Entry{}, err
	}
	rsdp, err := WriteFirmware(g, b.Firmware)
	if err != nil {
		return Entry{}, err
	}
	if img.protocol == protocolPVH {
		err = writePVHInfo(g, b, rd, rsdp)
	} else {
		err = writeZeroPage(g, b, img, rd, rsdp)
	}
	if err != nil {
		return Entry{}, err
	}
	return Entry{img.protocol, img.entry}, writePageTables(g)
}

type ramdisk struct{ address, length uint64 }

// loadInitrd puts the initial RAM disk as high as every kernel can address.
func loadInitrd(g memory.Guest, b Boot, kernelEnd memory.Address) (ramdisk, error) {
	if b.Initrd == nil || b.Initrd.Bytes == 0 {
		return ramdisk{}, nil
	}
	top := min(b.Memory, uint64(initrdCeiling))
	n := uint64(b.Initrd.Bytes)
	if n > top || (top-n)&^(memory.PageSize-1) < uint64(kernelEnd) {
		return ramdisk{}, errdefs.New(errdefs.ErrInvalid, "boot: an initial RAM disk of %d bytes does not fit into %d bytes of memory", n, b.Memory)
	}
	start := (top - n) &^ (memory.PageSize - 1)
	at, err := g.Slice(memory.Address(start), n)
	if err != nil {
		return ramdisk{}, err
	}
	if _, err := b.Initrd.ReadAt(at, 0); err != nil {
		return ramdisk{}, fmt.Errorf("load initial RAM disk: %w", err)
	}
	return ramdisk{start, n}, nil
}

type memoryRange struct {
	start, length uint64
	kind          uint32
}

// Kinds of memory in the map.
const (
	memoryUsable   = 1
	memoryReserved = 2
)

func memoryMap(bytes uint64) []memoryRange {
	low := min(bytes, uint64(memory.LowEnd))
	m := []memoryRange{
		{0, uint64(lowMemoryEnd), memoryUsable},
		{uint64(lowMemoryEnd), uint64(highMemoryStart - lowMemoryEnd), memoryReserved},
		{uint64(highMemoryStart), low - uint64(highMemoryStart), memoryUsable},
	}
	if bytes > low {
		m = append(m, memoryRange{uint64(memory.HighStart), bytes - low, memoryUsable})
	}
	return m
}

// Fields of struct boot_params.
const (
	rsdpAt         = 0x70
	extRamdiskAt   = 0xc0
	extRamdiskSize = 0xc4
	e820CountAt    = 0x1e8
	cmdlineSizeAt  = 0x238
	e820At         = 0x2d0
	e820Len        = 20
	kernelAlign    = 0x1000000
)

func writeZeroPage(g memory.Guest, b Boot, img image, rd ramdisk, rsdp memory.Address) error {
	le := binary.LittleEndian
	z := make([]byte, memory.PageSize)
	if img.header != nil {
		copy(z[setupHeader:], img.header)
	} else {
		le.PutUint16(z[bootFlagAt:], bootFlag)
		le.PutUint32(z[headerMagicAt:], headerMagic)
		le.PutUint16(z[versionAt:], version2_12)
		le.PutUint32(z[alignmentAt:], kernelAlign)
		le.PutUint32(z[cmdlineSizeAt:], maxCmdline)
	}
	z[loaderTypeAt] = loaderUndefined
	le.PutUint32(z[cmdlinePointerAt:], uint32(cmdlineAddress))
	le.PutUint32(z[ramdiskImageAt:], uint32(rd.address))
	le.PutUint32(z[extRamdiskAt:], uint32(rd.address>>32))
	le.PutUint32(z[ramdiskSizeAt:], uint32(rd.length))
	le.PutUint32(z[extRamdiskSize:], uint32(rd.length>>32))
	le.PutUint64(z[rsdpAt:], uint64(rsdp))
	m := memoryMap(b.Memory)
	z[e820CountAt] = byte(len(m))
	for i, r := range m {
		e := z[e820At+i*e820Len:]
		le.PutUint64(e, r.start)
		le.PutUint64(e[8:], r.length)
		le.PutUint32(e[16:], r.kind)
	}
	return g.WriteAt(z, zeroPageAddress)
}

// writePVHInfo writes struct hvm_start_info, version 1, with its lists.
func writePVHInfo(g memory.Guest, b Boot, rd ramdisk, rsdp memory.Address) error {
	const magic, version, infoLen, moduleLen, entryLen = 0x336ec578, 1, 56, 32, 24
	le := binary.LittleEndian
	m := memoryMap(b.Memory)
	info := make([]byte, infoLen+moduleLen+len(m)*entryLen)
	le.PutUint32(info, magic)
	le.PutUint32(info[4:], version)
	if rd.length > 0 {
		le.PutUint32(info[12:], 1)
		le.PutUint64(info[16:], uint64(pvhInfoAddress)+infoLen)
		le.PutUint64(info[infoLen:], rd.address)
		le.PutUint64(info[infoLen+8:], rd.length)
	}
	le.PutUint64(info[24:], uint64(cmdlineAddress))
	le.PutUint64(info[32:], uint64(rsdp))
	le.PutUint64(info[40:], uint64(pvhInfoAddress)+infoLen+moduleLen)
	le.PutUint32(info[48:], uint32(len(m)))
	for i, r := range m {
		e := info[infoLen+moduleLen+i*entryLen:]
		le.PutUint64(e, r.start)
		le.PutUint64(e[8:], r.length)
		le.PutUint32(e[16:], r.kind)
	}
	return g.WriteAt(info, pvhInfoAddress)
}

// Bits of page table entries.
const (
	pagePresent  = 1
	pageWritable = 2
	pageLarge    = 0x80
)

// writePageTables maps the first 4 GiB to themselves by pages of 2 MiB, and writes the
// descriptors that the first instructions run on.
func writePageTables(g memory.Guest) error {
	const directories, entries = 4, 512
	le := binary.LittleEndian
	t := make([]byte, (2+directories)*memory.PageSize)
	le.PutUint64(t, uint64(pageMapAddress)+memory.PageSize|pagePresent|pageWritable)
	for i := range directories {
		le.PutUint64(t[memory.PageSize+8*i:], uint64(pageMapAddress)+uint64(2+i)*memory.PageSize|pagePresent|pageWritable)
	}
	for i := range directories * entries {
		le.PutUint64(t[2*memory.PageSize+8*i:], uint64(i)<<21|pagePresent|pageWritable|pageLarge)
	}
	if err := g.WriteAt(t, pageMapAddress); err != nil {
		return err
	}
	gdt := make([]byte, 8*len(descriptors))
	for i, d := range descriptors {
		le.PutUint64(gdt[8*i:], d)
	}
	return g.WriteAt(gdt, gdtAddress)
}

// The boot protocol wants code at 0x10 and data at 0x18.
var descriptors = [...]uint64{0, 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00008b0000000067}

// SetRegisters makes a fresh vCPU start at the entry.
func (e Entry) SetRegisters(c *kvm.VCPU) error {
	s, err := c.Sregs()
	if err != nil {
		return err
	}
	data := kvm.Segment{Limit: 0xffffffff, Selector: 0x18, Type: 3, Present: 1, DB: 1, S: 1, G: 1}
	s.DS, s.ES, s.FS, s.GS, s.SS = data, data, data, data, data
	s.CS = data
	s.CS.Selector, s.CS.Type = 0x10, 0xb
	s.TR = kvm.Segment{Limit: 0x67, Selector: 0x20, Type: 0xb, Present: 1}
	s.GDT.Base, s.GDT.Limit = uint64(gdtAddress), uint16(8*len(descriptors)-1)
	s.IDT.Base, s.IDT.Limit = 0, 0
	const protectedMode, extensionType, paging, pae = 1, 1 << 4, 1 << 31, 1 << 5
	const longModeEnable, longModeActive = 1 << 8, 1 << 10
	const reservedFlag = 2
	r := kvm.Regs{RIP: e.address, RFLAGS: reservedFlag}
	s.CR0 = protectedMode | extensionType
	if e.protocol == protocolPVH {
		r.RBX = uint64(pvhInfoAddress)
	} else {
		s.CS.DB, s.CS.L = 0, 1
		s.CR0 |= paging
		s.CR3, s.CR4 = uint64(pageMapAddress), pae
		s.EFER |= longModeEnable | longModeActive
		r.RSI, r.RSP, r.RBP = uint64(zeroPageAddress), uint64(stackAddress), uint64(stackAddress)
	}
	if err := c.SetSregs(s); err != nil {
		return err
	}
	return c.SetRegs(r)
}
