package arch

import (
	"encoding/binary"
	"fmt"
)

// The few words of ACPI machine language that our tables need (specification 6.4,
// chapters 6.4 for resources and 20 for the encoding).
const (
	amlZero        = 0x00
	amlName        = 0x08
	amlByte        = 0x0a
	amlWord        = 0x0b
	amlDWord       = 0x0c
	amlString      = 0x0d
	amlScope       = 0x10
	amlBuffer      = 0x11
	amlPackage     = 0x12
	amlExtended    = 0x5b
	amlDevice      = 0x82
	resourceIO     = 0x47
	resourceFixed  = 0x86
	resourceIRQ    = 0x89
	resourceEnd    = 0x79
	irqConsumer    = 1 << 0
	irqEdge        = 1 << 1
	memoryReadable = 1
	decode16       = 1
)

// amlLength prepends the length of a package, which counts itself.
func amlLength(body []byte) []byte {
	switch n := len(body); {
	case n+1 <= 0x3f:
		return append([]byte{byte(n + 1)}, body...)
	case n+2 <= 0xfff:
		n += 2
		return append([]byte{0x40 | byte(n&0xf), byte(n >> 4)}, body...)
	default:
		n += 3
		return append([]byte{0x80 | byte(n&0xf), byte(n >> 4), byte(n >> 12)}, body...)
	}
}

func amlInt(v uint32) []byte {
	switch {
	case v == 0:
		return []byte{amlZero}
	case v <= 0xff:
		return []byte{amlByte, byte(v)}
	case v <= 0xffff:
		return []byte{amlWord, byte(v), byte(v >> 8)}
	}
	return binary.LittleEndian.AppendUint32([]byte{amlDWord}, v)
}

func amlText(s string) []byte { return append(append([]byte{amlString}, s...), 0) }

func amlNamed(name string, value []byte) []byte {
	return append(append([]byte{amlName}, name...), value...)
}

func amlBlock(op []byte, name string, parts ...[]byte) []byte {
	body := []byte(name)
	for _, p := range parts {
		body = append(body, p...)
	}
	return append(op, amlLength(body)...)
}

func amlDeviceOf(name string, parts ...[]byte) []byte {
	return amlBlock([]byte{amlExtended, amlDevice}, name, parts...)
}

// eisaID compresses an id like PNP0501.
func eisaID(id string) []byte {
	hex := func(c byte) uint32 {
		if c >= 'A' {
			return uint32(c-'A') + 10
		}
		return uint32(c - '0')
	}
	letter := func(i int) uint32 { return uint32(id[i]-'@') & 0x1f }
	v := letter(0)<<26 | letter(1)<<21 | letter(2)<<16 | hex(id[3])<<12 | hex(id[4])<<8 | hex(id[5])<<4 | hex(id[6])
	return binary.BigEndian.AppendUint32([]byte{amlDWord}, v)
}

// resources makes a resource template.
func resources(parts ...[]byte) []byte {
	var list []byte
	for _, p := range parts {
		list = append(list, p...)
	}
	list = append(list, resourceEnd, 0)
	return append([]byte{amlBuffer}, amlLength(append(amlInt(uint32(len(list))), list...))...)
}

func ioResource(port uint16, n byte) []byte {
	return []byte{resourceIO, decode16, byte(port), byte(port >> 8), byte(port), byte(port >> 8), 1, n}
}

func memoryResource(address, length uint32) []byte {
	b := binary.LittleEndian.AppendUint32([]byte{resourceFixed, 9, 0, memoryReadable}, address)
	return binary.LittleEndian.AppendUint32(b, length)
}

// irqResource is an edge-triggered, active-high, exclusive interrupt.
func irqResource(line uint32) []byte {
	return binary.LittleEndian.AppendUint32([]byte{resourceIRQ, 6, 0, irqConsumer | irqEdge, 1}, line)
}

// dsdt lists the devices of the machine and its power states.
func dsdt(f Firmware) []byte {
	var devices [][]byte
	if f.Serial {
		devices = append(devices, amlDeviceOf("COM1",
			amlNamed("_HID", eisaID("PNP0501")), amlNamed("_UID", amlInt(0)),
			amlNamed("_CRS", resources(ioResource(SerialPort, SerialPorts), irqResource(SerialIRQ)))))
	}
	for i := range f.MMIO {
		address, line := MMIOWindow(i)
		devices = append(devices, amlDeviceOf(fmt.Sprintf("VR%02d", i),
			amlNamed("_HID", amlText("LNRO0005")), amlNamed("_UID", amlInt(uint32(i))), amlNamed("_CCA", amlInt(1)),
			amlNamed("_CRS", resources(memoryResource(uint32(address), MMIOLength), irqResource(line)))))
	}
	scope := amlBlock([]byte{amlScope}, "\\_SB_", devices...)
	s5 := amlBlock([]byte{amlPackage}, "\x04", amlInt(s5Type), amlInt(0), amlInt(0), amlInt(0))
	return append(scope, amlNamed("_S5_", s5)...)
}
