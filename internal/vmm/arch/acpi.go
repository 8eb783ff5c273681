package arch

import (
	"encoding/binary"

	"forkd.dev/forkd/internal/errdefs"
	"forkd.dev/forkd/internal/vmm/memory"
)

// Firmware describes a machine for its ACPI tables.
type Firmware struct {
	CPUs   int
	Serial bool
	MMIO   int // virtio-mmio devices
}

// Lengths and fields of tables: ACPI specification 6.4, chapter 5.
const (
	acpiHeaderLen = 36
	fadtLen       = 276
	rsdpLen       = 36

	fadtFlagWBINVD      = 1 << 0
	fadtFlagNoPowerKey  = 1 << 4
	fadtFlagNoSleepKey  = 1 << 5
	fadtFlagResetReg    = 1 << 10
	fadtFlagHWReduced   = 1 << 20
	bootArchNoVGA       = 1 << 2
	bootArchNoRTC       = 1 << 5
	madtLocalAPIC       = 0
	madtIOAPIC          = 1
	madtLocalX2APICNMI  = 4
	gasSystemIO         = 1
	gasByteAccess       = 1
	allProcessors       = 0xff
	nmiPin              = 1
	acpiRevision        = 6
	madtRevision        = 5
	dsdtRevision        = 2
	tableCreatorVersion = 1
)

// table prepends the common header and fills in length and checksum.
func table(signature string, revision byte, body []byte) []byte {
	b := make([]byte, acpiHeaderLen, acpiHeaderLen+len(body))
	copy(b, signature)
	binary.LittleEndian.PutUint32(b[4:], uint32(acpiHeaderLen+len(body)))
	b[8] = revision
	copy(b[10:], "FORKD ")
	copy(b[16:], "FORKDVM ")
	binary.LittleEndian.PutUint32(b[24:], tableCreatorVersion)
	copy(b[28:], "FRKD")
	binary.LittleEndian.PutUint32(b[32:], tableCreatorVersion)
	b = append(b, body...)
	b[9] = checksum(b)
	return b
}

func checksum(b []byte) byte {
	var sum byte
	for _, v := range b {
		sum += v
	}
	return -sum
}

// gas writes a generic address structure of one byte-wide port.
func gas(b []byte, port uint64) {
	b[0], b[1], b[2], b[3] = gasSystemIO, 8, 0, gasByteAccess
	binary.LittleEndian.PutUint64(b[4:], port)
}

func fadt(dsdt uint64) []byte {
	b := make([]byte, fadtLen-acpiHeaderLen)
	at := func(offset int) []byte { return b[offset-acpiHeaderLen:] }
	le := binary.LittleEndian
	le.PutUint16(at(109), bootArchNoVGA|bootArchNoRTC)
	le.PutUint32(at(112), fadtFlagWBINVD|fadtFlagNoPowerKey|fadtFlagNoSleepKey|fadtFlagResetReg|fadtFlagHWReduced)
	gas(at(116), ResetPort)
	at(128)[0] = ResetValue
	le.PutUint64(at(140), dsdt)
	gas(at(244), SleepPort)
	gas(at(256), sleepStatus)
	copy(at(268), "FORKDVMM")
	return table("FACP", acpiRevision, b)
}

func madt(cpus int) []byte {
	le := binary.LittleEndian
	b := le.AppendUint32(nil, localAPICAddress)
	b = le.AppendUint32(b, 0) // no 8259
	for i := range cpus {
		b = append(b, madtLocalAPIC, 8, byte(i), byte(i))
		b = le.AppendUint32(b, 1) // enabled
	}
	b = append(b, madtIOAPIC, 12, 0, 0)
	b = le.AppendUint32(b, ioAPICAddress)
	b = le.AppendUint32(b, 0) // first interrupt
	b = append(b, madtLocalX2APICNMI, 6, allProcessors, 0, 0, nmiPin)
	return table("APIC", madtRevision, b)
}

// WriteFirmware puts the ACPI tables into guest memory and returns the address of the
// root pointer.
func WriteFirmware(g memory.Guest, f Firmware) (memory.Address, error) {
	if f.MMIO > maxMMIO {
		return 0, errdefs.New(errdefs.ErrInvalid, "write ACPI tables: %d devices, more than %d", f.MMIO, maxMMIO)
	}
	le := binary.LittleEndian
	next := acpiAddress + rsdpLen
	var out []byte
	place := func(b []byte) uint64 {
		for len(out)%8 != 0 {
			out = append(out, 0)
		}
		a := uint64(next) + uint64(len(out))
		out = append(out, b...)
		return a
	}
	next = (next + 7) &^ 7
	dsdtAt := place(table("DSDT", dsdtRevision, dsdt(f)))
	fadtAt := place(fadt(dsdtAt))
	madtAt := place(madt(f.CPUs))
	xsdtAt := place(table("XSDT", 1, le.AppendUint64(le.AppendUint64(nil, fadtAt), madtAt)))
	if len(out) > maxACPIBytes {
		return 0, errdefs.New(errdefs.ErrInternal, "write ACPI tables: %d bytes", len(out))
	}
	rsdp := make([]byte, rsdpLen)
	copy(rsdp, "RSD PTR ")
	copy(rsdp[9:], "FORKD ")
	rsdp[15] = 2
	le.PutUint32(rsdp[20:], rsdpLen)
	le.PutUint64(rsdp[24:], xsdtAt)
	rsdp[8] = checksum(rsdp[:20])
	rsdp[32] = checksum(rsdp)
	if err := g.WriteAt(rsdp, acpiAddress); err != nil {
		return 0, err
	}
	return acpiAddress, g.WriteAt(out, next)
}
