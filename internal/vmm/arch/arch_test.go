package arch

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"forkd.dev/forkd/internal/tinyguest"
	"forkd.dev/forkd/internal/vmm/kvm"
	"forkd.dev/forkd/internal/vmm/memory"
)

const testMemory = 64 << 20

func guest(t testing.TB) *memory.Space {
	t.Helper()
	s, err := memory.New(memory.Config{Bytes: testMemory})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func file(b []byte) File { return File{ReaderAt: bytes.NewReader(b), Bytes: int64(len(b))} }

func at(t testing.TB, g memory.Guest, a memory.Address, n uint64) []byte {
	t.Helper()
	b, err := g.Slice(a, n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestFirmware follows the tables from the root pointer, as a guest does.
func TestFirmware(t *testing.T) {
	g := guest(t)
	root, err := WriteFirmware(g, Firmware{CPUs: 8, Serial: true, MMIO: maxMMIO})
	if err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	rsdp := at(t, g, root, rsdpLen)
	if string(rsdp[:8]) != "RSD PTR " || checksum(rsdp[:20]) != 0 || checksum(rsdp) != 0 {
		t.Fatalf("root pointer %q", rsdp)
	}
	open := func(a uint64) []byte {
		n := le.Uint32(at(t, g, memory.Address(a), acpiHeaderLen)[4:])
		b := at(t, g, memory.Address(a), uint64(n))
		if checksum(b) != 0 {
			t.Errorf("table %q has a wrong checksum", b[:4])
		}
		return b
	}
	xsdt := open(le.Uint64(rsdp[24:]))
	found := map[string][]byte{}
	for b := xsdt[acpiHeaderLen:]; len(b) > 0; b = b[8:] {
		table := open(le.Uint64(b))
		found[string(table[:4])] = table
	}
	fadt := found["FACP"]
	if len(fadt) != fadtLen || le.Uint32(fadt[112:])&fadtFlagHWReduced == 0 {
		t.Fatalf("FADT of %d bytes", len(fadt))
	}
	if n := bytes.Count(found["APIC"][44:], []byte{madtLocalAPIC, 8}); n != 8 {
		t.Errorf("%d processors", n)
	}
	dsdt := open(le.Uint64(fadt[140:]))
	if n := bytes.Count(dsdt, []byte("LNRO0005")); n != maxMMIO || !bytes.Contains(dsdt, []byte("COM1")) || !bytes.Contains(dsdt, []byte("_S5_")) {
		t.Errorf("DSDT has %d devices", n)
	}
	// The length of the scope ends exactly where the sleep state begins.
	body := dsdt[acpiHeaderLen:]
	if body[0] != amlScope {
		t.Fatalf("DSDT begins with %#x", body[0])
	}
	n := int(body[1]&0xf) | int(body[2])<<4
	if body[1]>>6 == 2 {
		n |= int(body[3]) << 12
	}
	if rest := body[1+n:]; !bytes.HasPrefix(rest, append([]byte{amlName}, "_S5_"...)) {
		t.Errorf("after the scope: %q", rest[:8])
	}
	if _, err := WriteFirmware(g, Firmware{CPUs: 1, MMIO: maxMMIO + 1}); err == nil {
		t.Error("too many devices are accepted")
	}
}

// bzImage makes a kernel of that format.
func bzImage(payload []byte) []byte {
	b := make([]byte, 2*sectorLen, 2*sectorLen+len(payload))
	le := binary.LittleEndian
	b[setupSects] = 1
	b[jumpLength] = 0x6a
	le.PutUint32(b[headerMagicAt:], headerMagic)
	le.PutUint16(b[versionAt:], version2_12)
	le.PutUint16(b[xLoadFlagsAt:], xLoadKernel64)
	le.PutUint64(b[prefAddressAt:], uint64(defaultKernel))
	le.PutUint32(b[initSizeAt:], 8<<20)
	return append(b, payload...)
}

// pvhELF adds a note with a PVH entry to the tiny guest.
func pvhELF(entry uint64) []byte {
	b := bytes.Clone(tinyguest.ELF())
	le := binary.LittleEndian
	note := le.AppendUint32(nil, 4)
	note = le.AppendUint32(note, 8)
	note = le.AppendUint32(note, notePhysicalPVH)
	note = append(note, noteOwnerPVH...)
	note = le.AppendUint64(note, entry)
	offset := uint64(len(b))
	b = append(b, note...)
	// The headers move to the end, where a second one has room.
	old := le.Uint64(b[32:])
	table := uint64(len(b))
	b = append(b, b[old:old+segmentLen64]...)
	second := make([]byte, segmentLen64)
	le.PutUint32(second, elfNote)
	le.PutUint64(second[8:], offset)
	le.PutUint64(second[32:], uint64(len(note)))
	b = append(b, second...)
	le.PutUint64(b[32:], table)
	le.PutUint16(b[56:], 2)
	return b
}

func TestLoad(t *testing.T) {
	const cmdline = "console=ttyS0 quiet"
	for name, c := range map[string]struct {
		kernel []byte
		pvh    bool
		entry  uint64
		wide   bool
	}{
		"vmlinux":         {tinyguest.ELF(), false, 0x1000000, true},
		"bzImage":         {bzImage([]byte("kernel")), false, uint64(defaultKernel) + entry64Offset, true},
		"PVH":             {pvhELF(0x1234567), true, 0x1234567, false},
		"PVH, not wanted": {pvhELF(0x1234567), false, 0x1000000, true},
	} {
		g := guest(t)
		initrd := file([]byte("initial RAM disk"))
		e, err := Load(g, Boot{Kernel: file(c.kernel), Initrd: &initrd, Cmdline: cmdline, Memory: testMemory, UsePVH: c.pvh, Firmware: Firmware{CPUs: 1}})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if e.address != c.entry || (e.protocol == protocolLinux64) != c.wide {
			t.Errorf("%s: entry %+v", name, e)
		}
		le := binary.LittleEndian
		if !c.wide {
			if info := at(t, g, pvhInfoAddress, 56); le.Uint32(info) != 0x336ec578 || le.Uint64(info[32:]) != uint64(acpiAddress) {
				t.Errorf("%s: start info %x", name, info)
			}
			continue
		}
		z := at(t, g, zeroPageAddress, memory.PageSize)
		line := at(t, g, memory.Address(le.Uint32(z[cmdlinePointerAt:])), uint64(len(cmdline)+1))
		disk := at(t, g, memory.Address(le.Uint32(z[ramdiskImageAt:])), uint64(le.Uint32(z[ramdiskSizeAt:])))
		if string(line) != cmdline+"\x00" || string(disk) != "initial RAM disk" || le.Uint64(z[rsdpAt:]) != uint64(acpiAddress) {
			t.Errorf("%s: %q, %q", name, line, disk)
		}
		if z[e820CountAt] != 3 || le.Uint32(z[headerMagicAt:]) != headerMagic || z[loaderTypeAt] != loaderUndefined {
			t.Errorf("%s: zero page with %d ranges", name, z[e820CountAt])
		}
	}
}

func TestMemoryMap(t *testing.T) {
	for _, bytes := range []uint64{64 << 20, 3 << 30, 5 << 30} {
		sum, end := uint64(0), uint64(0)
		for _, r := range memoryMap(bytes) {
			if r.start < end {
				t.Errorf("%#x: range at %#x", bytes, r.start)
			}
			end = r.start + r.length
			sum += r.length
		}
		if sum != bytes {
			t.Errorf("%#x bytes of memory, the map has %#x", bytes, sum)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	long := bytes.Repeat([]byte{0}, setupEnd)
	old := bzImage([]byte("kernel"))
	old[versionAt] = 0
	low := bzImage([]byte("kernel"))
	binary.LittleEndian.PutUint64(low[prefAddressAt:], 0x1000)
	big := bzImage([]byte("kernel"))
	binary.LittleEndian.PutUint32(big[initSizeAt:], testMemory)
	huge := file(tinyguest.ELF())
	for name, b := range map[string]Boot{
		"nothing":      {Kernel: file(nil)},
		"zeros":        {Kernel: file(long)},
		"old bzImage":  {Kernel: file(old)},
		"low bzImage":  {Kernel: file(low)},
		"big bzImage":  {Kernel: file(big)},
		"no PVH entry": {Kernel: file(tinyguest.ELF()), UsePVH: true},
		"command line": {Kernel: file(tinyguest.ELF()), Cmdline: strings.Repeat("x", maxCmdline+1)},
		"RAM disk":     {Kernel: file(tinyguest.ELF()), Initrd: &File{ReaderAt: huge, Bytes: testMemory}},
	} {
		b.Memory = testMemory
		if _, err := Load(guest(t), b); err == nil {
			t.Errorf("%s is loaded", name)
		}
	}
}

// TestTemplate: nothing that the host has gets to a guest unless it is on the list.
func TestTemplate(t *testing.T) {
	ones := ^uint32(0)
	var supported []kvm.CPUIDEntry
	for _, f := range []uint32{0, 1, 2, 4, 6, 7, 0xa, 0xd, 0x14, 0x40000000, 0x40000001, 0x80000000, 0x80000001, 0x80000008, 0x8000000a, 0x8000001f} {
		supported = append(supported, kvm.CPUIDEntry{Function: f, EAX: ones, EBX: ones, ECX: ones, EDX: ones})
	}
	for _, features := range []Features{HostFeatures, LowestFeatures} {
		got := map[uint32]kvm.CPUIDEntry{}
		for _, e := range ForCPU(Template(supported, 4, features, 1), 3) {
			if e.Index == 0 {
				got[e.Function] = e
			}
		}
		for _, f := range []uint32{0xa, 0x14, 0x8000000a, 0x8000001f} {
			if _, ok := got[f]; ok {
				t.Errorf("leaf %#x passes", f)
			}
		}
		one := got[1]
		if one.EBX>>24 != 3 || one.EBX>>16&0xff != 4 || one.ECX&(1<<3|1<<5|1<<6) != 0 || one.ECX&ecxHypervisor == 0 || one.ECX&ecxTSCDeadline == 0 {
			t.Errorf("leaf 1 is %+v", one)
		}
		if got[0x80000001].ECX&svm != 0 {
			t.Error("nested virtualization passes")
		}
		if got[0xb].EDX != 3 {
			t.Errorf("x2APIC id %d", got[0xb].EDX)
		}
		const avx, xsave = 1 << 28, 1 << 26
		if low := one.ECX&(avx|xsave) == 0; low != (features == LowestFeatures) {
			t.Errorf("features %d: leaf 1 ECX %#x", features, one.ECX)
		}
	}
}

// FuzzLoad: a kernel comes from an image that somebody made. Whatever it is, it is loaded
// inside of the guest's memory or refused.
func FuzzLoad(f *testing.F) {
	f.Add(tinyguest.ELF(), false)
	f.Add(bzImage([]byte("kernel")), false)
	f.Add(pvhELF(0x1234567), true)
	s, err := memory.New(memory.Config{Bytes: testMemory})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(s.Close)
	f.Fuzz(func(_ *testing.T, kernel []byte, pvh bool) {
		_, _ = Load(s, Boot{Kernel: file(kernel), Memory: testMemory, UsePVH: pvh, Firmware: Firmware{CPUs: 1}})
	})
}
