//go:build amd64

package linux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"forkd.dev/forkd/internal/errdefs"
)

func needKVM(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("needs a usable /dev/kvm: %v", err)
	}
	f.Close()
}

func TestKVMProbe(t *testing.T) {
	needKVM(t)
	speed, err := KVMProbe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log(speed)
	if speed.Took > 3*kvmProbeTime {
		t.Errorf("the probe ran for %v, bound is %v", speed.Took, kvmProbeTime)
	}
	// kvm_pvm is the module of the hosts known to emulate kernel code.
	if _, err := os.Stat("/sys/module/kvm_pvm"); err == nil && speed.Fast() {
		t.Errorf("%v, but kvm_pvm emulates it", speed)
	}
	if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		for _, e := range entries {
			if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.Contains(target, "kvm") {
				t.Errorf("descriptor %s of the probe is still open: %s", e.Name(), target)
			}
		}
	}
}

func TestKVMProbeCanceled(t *testing.T) {
	needKVM(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := KVMProbe(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("probe with a canceled context: %v", err)
	}
}

func TestKVMHaltEndsTheRun(t *testing.T) {
	needKVM(t)
	vm, err := openThrowawayVM()
	if err != nil {
		t.Fatal(err)
	}
	defer vm.close()
	if err := vm.load([]byte{0x49, 0x75, 0xfd, 0xf4}, 1000); err != nil {
		t.Fatal(err)
	}
	left, took, err := vm.runFor(t.Context(), 20*kvmProbeTime)
	if err != nil || left != 0 {
		t.Fatalf("left %d of 1000 rounds after %v: %v", left, took, err)
	}
}

func TestTSCRatesAgree(t *testing.T) {
	needKVM(t)
	asked, err := kvmTSCkHz()
	if err != nil {
		t.Skipf("needs KVM_GET_TSC_KHZ: %v", err)
	}
	measured, err := measureTSCkHz()
	if err != nil {
		t.Fatal(err)
	}
	ppm := (float64(measured) - float64(asked)) / float64(asked) * 1e6
	t.Logf("KVM says %d kHz, measured %d kHz: %+.0f ppm", asked, measured, ppm)
	if ppm > 500 || ppm < -500 {
		t.Errorf("the two rates differ by %.0f ppm, more than 500", ppm)
	}
}

func TestHintKVM(t *testing.T) {
	for _, class := range []error{errdefs.ErrNotFound, errdefs.ErrPermission} {
		if err := hintKVM(class); errdefs.Hint(err) == "" || !errors.Is(err, class) {
			t.Errorf("no hint for %v", class)
		}
	}
}

// TestKVMConstants lets the C compiler say what the kernel's header says.
func TestKVMConstants(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc to read linux/kvm.h")
	}
	if _, err := os.Stat("/usr/include/linux/kvm.h"); err != nil {
		t.Skip("needs linux/kvm.h (Debian package linux-libc-dev)")
	}
	var regs kvmRegs
	var sregs kvmSregs
	var region kvmMemoryRegion
	want := []struct {
		expr string
		got  uintptr
	}{
		{"KVM_GET_API_VERSION", kvmGetAPIVersion},
		{"KVM_CREATE_VM", kvmCreateVM},
		{"KVM_GET_VCPU_MMAP_SIZE", kvmGetVCPUMmapSize},
		{"KVM_CREATE_VCPU", kvmCreateVCPU},
		{"KVM_SET_USER_MEMORY_REGION", kvmSetUserMemoryRegion},
		{"KVM_RUN", kvmRun},
		{"KVM_GET_REGS", kvmGetRegs},
		{"KVM_SET_REGS", kvmSetRegs},
		{"KVM_GET_SREGS", kvmGetSregs},
		{"KVM_SET_SREGS", kvmSetSregs},
		{"KVM_GET_TSC_KHZ", kvmGetTSCkHz},
		{"KVM_API_VERSION", kvmAPIVersion},
		{"KVM_EXIT_HLT", kvmExitHLT},
		{"offsetof(struct kvm_run, immediate_exit)", kvmRunImmediateExit},
		{"offsetof(struct kvm_run, exit_reason)", kvmRunExitReason},
		{"sizeof(struct kvm_regs)", unsafe.Sizeof(regs)},
		{"offsetof(struct kvm_regs, rcx)", unsafe.Offsetof(regs.RCX)},
		{"offsetof(struct kvm_regs, rflags)", unsafe.Offsetof(regs.RFLAGS)},
		{"sizeof(struct kvm_sregs)", unsafe.Sizeof(sregs)},
		{"offsetof(struct kvm_sregs, ss)", unsafe.Offsetof(sregs.SS)},
		{"offsetof(struct kvm_sregs, cr0)", unsafe.Offsetof(sregs.CR0)},
		{"offsetof(struct kvm_segment, type)", unsafe.Offsetof(sregs.CS.Type)},
		{"offsetof(struct kvm_segment, db)", unsafe.Offsetof(sregs.CS.DB)},
		{"offsetof(struct kvm_segment, g)", unsafe.Offsetof(sregs.CS.G)},
		{"sizeof(struct kvm_userspace_memory_region)", unsafe.Sizeof(region)},
		{"offsetof(struct kvm_userspace_memory_region, userspace_addr)", unsafe.Offsetof(region.UserspaceAddr)},
	}
	var prog strings.Builder
	prog.WriteString("#include <linux/kvm.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n")
	for _, w := range want {
		fmt.Fprintf(&prog, "printf(\"%%lu\\n\", (unsigned long)(%s));\n", w.expr)
	}
	prog.WriteString("return 0; }\n")
	dir := t.TempDir()
	source, program := filepath.Join(dir, "kvm.c"), filepath.Join(dir, "kvm")
	if err := os.WriteFile(source, []byte(prog.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), gcc, "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), program).Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(string(out))
	if len(lines) != len(want) {
		t.Fatalf("%d values, want %d", len(lines), len(want))
	}
	for i, w := range want {
		if lines[i] != fmt.Sprint(w.got) {
			t.Errorf("%s is %s, we have %d", w.expr, lines[i], w.got)
		}
	}
}
