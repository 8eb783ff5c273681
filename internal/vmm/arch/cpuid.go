package arch

import (
	"math/bits"

	"forkd.dev/forkd/internal/vmm/kvm"
)

// Features is how much of the host's processor a guest sees.
type Features int

// What guests are offered.
const (
	// HostFeatures: what KVM offers here and we know to survive a snapshot.
	HostFeatures Features = iota
	// LowestFeatures: only what every x86-64-v2 processor has, so that snapshots go to
	// other hosts.
	LowestFeatures
)

// mask is what may pass of a CPUID entry.
type mask struct{ eax, ebx, ecx, edx uint32 }

var all = mask{^uint32(0), ^uint32(0), ^uint32(0), ^uint32(0)}

type leaf struct{ function, index uint32 }

// Bits of CPUID (AMD APM volume 3, appendix E; Intel SDM volume 2, CPUID).
const (
	ecxHypervisor  = 1 << 31
	ecxTSCDeadline = 1 << 24
	edxHTT         = 1 << 28
	eaxARAT        = 1 << 2

	// Not offered: MONITOR, VMX, SMX, EST, TM2, SDBG, DCA, PDCM, DTES64, DS_CPL.
	leaf1ECX = 0x76fa3203
	// Not offered: DS, ACPI, TM, PBE.
	leaf1EDX = 0x1f8bfbff
	// x86-64-v2: SSE3, SSSE3, CX16, SSE4.1, SSE4.2, POPCNT; and x2APIC.
	leaf1ECXLowest = 0x00b82201
	// Leaf 7: FSGSBASE, BMI, AVX2, SMEP, ERMS, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB, SHA, AVX-512.
	leaf7EBX = 0xf1bf07ab
	// AVX-512 extensions, UMIP, GFNI, VAES, RDPID.
	leaf7ECX = 0x00405f46
	// Speculation controls and FSRM, AVX-512 leftovers, SERIALIZE.
	leaf7EDX = 0xac004510
	// XSAVE components: x87, SSE, AVX, AVX-512. Tiles need a permission that we do not ask for.
	xcr0Allowed = 0xe7
	// LAHF, CMP_LEGACY, ABM, SSE4A, MISALIGNSSE, 3DNOWPREFETCH, FMA4, TBM, PERFCTR not.
	ext1ECX = 0x000001f3
	ext1EDX = 0x2fd3fbff
	// LAHF, syscall, NX, RDTSCP, long mode.
	ext1ECXLowest = 0x00000001
	ext1EDXLowest = 0x28100800
	// CLZERO, IBPB, IBRS, STIBP, SSBD.
	ext8EBX       = 0x0700d001
	invariantTSC  = 1 << 8
	svm           = 1 << 2
	xsaveFeatures = 0xf
)

// allowed lists the leaves that pass, and what of them. A leaf that is not listed, or a
// later sub-leaf, does not pass.
var allowed = map[leaf]mask{
	{0, 0}: all, {2, 0}: all, {1, 0}: {all.eax, all.ebx, leaf1ECX, leaf1EDX},
	{6, 0}: {eaxARAT, 0, 0, 0}, {7, 0}: {0, leaf7EBX, leaf7ECX, leaf7EDX}, {0xd, 1}: {xsaveFeatures, all.ebx, 0, 0},
	{0x15, 0}: all, {0x16, 0}: all,
	{0x40000000, 0}: all, {0x40000001, 0}: all,
	{0x80000000, 0}: all, {0x80000001, 0}: {all.eax, all.ebx, ext1ECX &^ svm, ext1EDX},
	{0x80000002, 0}: all, {0x80000003, 0}: all, {0x80000004, 0}: all, {0x80000005, 0}: all, {0x80000006, 0}: all,
	{0x80000007, 0}: {0, 0, 0, invariantTSC}, {0x80000008, 0}: {all.eax, ext8EBX, all.ecx, 0},
}

var lowest = map[leaf]mask{
	{1, 0}: {all.eax, all.ebx, leaf1ECXLowest, leaf1EDX}, {7, 0}: {}, {6, 0}: {eaxARAT, 0, 0, 0},
	{0x80000001, 0}: {all.eax, all.ebx, ext1ECXLowest, ext1EDXLowest}, {0x80000008, 0}: {all.eax, 0, all.ecx, 0},
}

// Template makes the CPUID of the guest's processors from what KVM supports on this host,
// for cpus processors. ForCPU makes it that of one of them.
func Template(supported []kvm.CPUIDEntry, cpus int, f Features, tscDeadline int) []kvm.CPUIDEntry {
	var out []kvm.CPUIDEntry
	for _, e := range supported {
		if e, ok := filter(e, f); ok {
			out = append(out, e)
		}
	}
	for i := range out {
		adjust(&out[i], cpus, tscDeadline != 0)
	}
	// How processors are arranged: one thread each, all in one package.
	const significantIndex, threadLevel, coreLevel = 1, 1 << 8, 2 << 8
	return append(out,
		kvm.CPUIDEntry{Function: 0xb, Index: 0, Flags: significantIndex, EBX: 1, ECX: threadLevel},
		kvm.CPUIDEntry{Function: 0xb, Index: 1, Flags: significantIndex, EAX: shift(cpus), EBX: uint32(cpus), ECX: coreLevel | 1})
}

func shift(cpus int) uint32 { return uint32(bits.Len(uint(cpus - 1))) }

func filter(e kvm.CPUIDEntry, f Features) (kvm.CPUIDEntry, bool) {
	key := leaf{e.Function, e.Index}
	m, ok := allowed[key]
	switch {
	case f == LowestFeatures && e.Function == 0xd:
		return e, false
	case e.Function == 4:
		return e, true // caches
	case e.Function == 0xd && e.Index == 0:
		e.EAX, e.EDX = e.EAX&xcr0Allowed, 0
		return e, true
	case e.Function == 0xd && e.Index > 1:
		return e, e.Index < 32 && xcr0Allowed>>e.Index&1 == 1
	}
	if low, is := lowest[key]; is && f == LowestFeatures {
		m = low
	}
	e.EAX, e.EBX, e.ECX, e.EDX = e.EAX&m.eax, e.EBX&m.ebx, e.ECX&m.ecx, e.EDX&m.edx
	return e, ok
}

// adjust sets what depends on the machine.
func adjust(e *kvm.CPUIDEntry, cpus int, tscDeadline bool) {
	switch e.Function {
	case 1:
		e.ECX |= ecxHypervisor
		if tscDeadline {
			e.ECX |= ecxTSCDeadline
		}
		e.EBX = e.EBX&0x0000ffff | uint32(cpus)<<16
		if cpus > 1 {
			e.EDX |= edxHTT
		}
	case 4:
		// EAX 25..14: threads that share the cache, 31..26: cores in the package.
		e.EAX = e.EAX&0x3fff | (uint32(1)<<shift(cpus)-1)<<26
	case 0x80000008:
		e.ECX = uint32(cpus-1) | shift(cpus)<<12
	case 0x80000001:
		if cpus > 1 {
			e.ECX |= 1 << 1 // CMP_LEGACY
		}
	}
}

// ForCPU returns the template with the APIC id of processor id.
func ForCPU(template []kvm.CPUIDEntry, id int) []kvm.CPUIDEntry {
	out := append([]kvm.CPUIDEntry(nil), template...)
	for i := range out {
		switch e := &out[i]; e.Function {
		case 1:
			e.EBX = e.EBX&0x00ffffff | uint32(id)<<24
		case 0xb:
			e.EDX = uint32(id)
		}
	}
	return out
}
