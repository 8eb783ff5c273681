package kvm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"
)

// TestHeader compares every constant, size and offset with linux/kvm.h.
func TestHeader(t *testing.T) {
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("needs a C compiler")
	}
	want := map[string]uint64{
		"KVM_GET_API_VERSION": getAPIVersion, "KVM_CREATE_VM": createVM, "KVM_GET_MSR_INDEX_LIST": getMSRIndexList,
		"KVM_CHECK_EXTENSION": checkExtension, "KVM_GET_VCPU_MMAP_SIZE": getVCPUMmapSize, "KVM_GET_SUPPORTED_CPUID": getSupportedCPUID,
		"KVM_SET_TSS_ADDR": setTSSAddr, "KVM_SET_IDENTITY_MAP_ADDR": setIdentityMapAddr,
		"KVM_SET_USER_MEMORY_REGION": setUserMemoryRegion, "KVM_CREATE_VCPU": createVCPU, "KVM_CREATE_IRQCHIP": createIRQChip,
		"KVM_IRQ_LINE": irqLine, "KVM_GET_IRQCHIP": getIRQChip, "KVM_SET_IRQCHIP": setIRQChip, "KVM_IRQFD": irqFD,
		"KVM_IOEVENTFD": ioEventFD, "KVM_SET_CLOCK": setClock, "KVM_GET_CLOCK": getClock, "KVM_RUN": run,
		"KVM_GET_REGS": getRegs, "KVM_SET_REGS": setRegs, "KVM_GET_SREGS": getSregs, "KVM_SET_SREGS": setSregs,
		"KVM_GET_MSRS": getMSRs, "KVM_SET_MSRS": setMSRs, "KVM_GET_LAPIC": getLAPIC, "KVM_SET_LAPIC": setLAPIC,
		"KVM_SET_CPUID2": setCPUID2, "KVM_GET_MP_STATE": getMPState, "KVM_SET_MP_STATE": setMPState,
		"KVM_GET_VCPU_EVENTS": getVCPUEvents, "KVM_SET_VCPU_EVENTS": setVCPUEvents, "KVM_GET_DEBUGREGS": getDebugRegs,
		"KVM_SET_DEBUGREGS": setDebugRegs, "KVM_SET_TSC_KHZ": setTSCkHz, "KVM_GET_TSC_KHZ": getTSCkHz, "KVM_GET_XSAVE": getXsave,
		"KVM_SET_XSAVE": setXsave, "KVM_GET_XSAVE2": getXsave2, "KVM_GET_XCRS": getXcrs, "KVM_SET_XCRS": setXcrs,
		"KVM_KVMCLOCK_CTRL": kvmclockCtrl,
		"KVM_CAP_IRQCHIP":   CapIRQChip, "KVM_CAP_USER_MEMORY": CapUserMemory, "KVM_CAP_NR_MEMSLOTS": CapNRMemSlots, "KVM_CAP_MP_STATE": CapMPState,
		"KVM_CAP_IRQFD": CapIRQFD, "KVM_CAP_IOEVENTFD": CapIOEventFD, "KVM_CAP_ADJUST_CLOCK": CapAdjustClock, "KVM_CAP_VCPU_EVENTS": CapVCPUEvents,
		"KVM_CAP_DEBUGREGS": CapDebugRegs, "KVM_CAP_XSAVE": CapXsave, "KVM_CAP_XCRS": CapXcrs, "KVM_CAP_TSC_CONTROL": CapTSCControl,
		"KVM_CAP_TSC_DEADLINE_TIMER": CapTSCDeadline, "KVM_CAP_IMMEDIATE_EXIT": CapImmediateExit, "KVM_CAP_XSAVE2": CapXsave2,
		"KVM_EXIT_UNKNOWN": ExitUnknown, "KVM_EXIT_IO": ExitIO, "KVM_EXIT_DEBUG": ExitDebug, "KVM_EXIT_HLT": ExitHLT, "KVM_EXIT_MMIO": ExitMMIO,
		"KVM_EXIT_SHUTDOWN": ExitShutdown, "KVM_EXIT_FAIL_ENTRY": ExitFailEntry, "KVM_EXIT_INTR": ExitIntr, "KVM_EXIT_INTERNAL_ERROR": ExitInternal,
		"KVM_EXIT_SYSTEM_EVENT": ExitSystemEvent, "KVM_API_VERSION": apiVersion,
		"KVM_MP_STATE_RUNNABLE": MPRunnable, "KVM_MP_STATE_UNINITIALIZED": MPUninitialized, "KVM_MP_STATE_HALTED": MPHalted,
		"KVM_EXIT_IO_OUT": ioOut, "KVM_NR_IRQCHIPS": IRQChips,
		"offsetof(struct kvm_run, immediate_exit)": runImmediateExit, "offsetof(struct kvm_run, exit_reason)": runExitReason,
		"offsetof(struct kvm_run, hw)": runUnion, "offsetof(struct kvm_run, io.direction)": runIODirection,
		"offsetof(struct kvm_run, io.size)": runIOSize, "offsetof(struct kvm_run, io.port)": runIOPort,
		"offsetof(struct kvm_run, io.count)": runIOCount, "offsetof(struct kvm_run, io.data_offset)": runIODataOffset,
		"offsetof(struct kvm_run, mmio.phys_addr)": runMMIOAddress, "offsetof(struct kvm_run, mmio.data)": runMMIOData,
		"offsetof(struct kvm_run, mmio.len)": runMMIOLen, "offsetof(struct kvm_run, mmio.is_write)": runMMIOIsWrite,
		"sizeof(struct kvm_clock_data)": clockLen, "sizeof(struct kvm_irqchip)": irqChipLen, "sizeof(struct kvm_lapic_state)": lapicLen,
		"sizeof(struct kvm_vcpu_events)": eventsLen, "sizeof(struct kvm_debugregs)": debugLen, "sizeof(struct kvm_xsave)": xsaveLen,
		"sizeof(struct kvm_xcrs)": xcrsLen, "sizeof(struct kvm_mp_state)": uint64(items[ItemMPState].size),
		"sizeof(struct kvm_regs)": uint64(unsafe.Sizeof(Regs{})), "sizeof(struct kvm_sregs)": uint64(unsafe.Sizeof(Sregs{})),
		"sizeof(struct kvm_cpuid_entry2)": uint64(unsafe.Sizeof(CPUIDEntry{})), "sizeof(struct kvm_msr_entry)": uint64(unsafe.Sizeof(MSR{})),
		"sizeof(struct kvm_userspace_memory_region)": uint64(unsafe.Sizeof(memoryRegion{})), "sizeof(struct kvm_irqfd)": uint64(unsafe.Sizeof(irqFDArg{})),
		"sizeof(struct kvm_ioeventfd)": uint64(unsafe.Sizeof(ioEventFDArg{})), "offsetof(struct kvm_msrs, entries)": uint64(unsafe.Offsetof(msrList{}.Entries)),
		"offsetof(struct kvm_msr_list, indices)": uint64(unsafe.Offsetof(indexList{}.Indices)), "offsetof(struct kvm_cpuid2, entries)": uint64(unsafe.Offsetof(cpuidList{}.Entries)),
		"offsetof(struct kvm_sregs, cr0)": uint64(unsafe.Offsetof(Sregs{}.CR0)), "offsetof(struct kvm_sregs, gdt)": uint64(unsafe.Offsetof(Sregs{}.GDT)),
		"offsetof(struct kvm_sregs, efer)": uint64(unsafe.Offsetof(Sregs{}.EFER)), "offsetof(struct kvm_regs, rip)": uint64(unsafe.Offsetof(Regs{}.RIP)),
		"offsetof(struct kvm_regs, rsi)": uint64(unsafe.Offsetof(Regs{}.RSI)), "offsetof(struct kvm_segment, selector)": uint64(unsafe.Offsetof(Segment{}.Selector)),
		"offsetof(struct kvm_segment, dpl)": uint64(unsafe.Offsetof(Segment{}.DPL)), "offsetof(struct kvm_segment, l)": uint64(unsafe.Offsetof(Segment{}.L)),
		"offsetof(struct kvm_cpuid_entry2, ecx)": uint64(unsafe.Offsetof(CPUIDEntry{}.ECX)), "offsetof(struct kvm_msr_entry, data)": uint64(unsafe.Offsetof(MSR{}.Data)),
		"offsetof(struct kvm_ioeventfd, fd)": uint64(unsafe.Offsetof(ioEventFDArg{}.FD)), "offsetof(struct kvm_irqfd, gsi)": uint64(unsafe.Offsetof(irqFDArg{}.GSI)),
		"offsetof(struct kvm_userspace_memory_region, userspace_addr)": uint64(unsafe.Offsetof(memoryRegion{}.UserspaceAddr)),
		"offsetof(struct kvm_clock_data, flags)":                       8,
	}
	var c strings.Builder
	c.WriteString("#include <linux/kvm.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n")
	for name := range want {
		fmt.Fprintf(&c, "printf(\"%%llu %s\\n\", (unsigned long long)(%s));\n", name, name)
	}
	c.WriteString("return 0; }\n")
	dir := t.TempDir()
	source, program := filepath.Join(dir, "header.c"), filepath.Join(dir, "header")
	if err := os.WriteFile(source, []byte(c.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cc", "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	out, err := exec.Command(program).Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != len(want) {
		t.Errorf("%d values of %d", len(lines), len(want))
	}
	for _, line := range lines {
		var v uint64
		_, name, _ := strings.Cut(line, " ")
		if _, err := fmt.Sscan(line, &v); err != nil || v != want[name] {
			t.Errorf("%s is %#x in the header, %#x here", name, v, want[name])
		}
	}
}
