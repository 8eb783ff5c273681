//go:build amd64

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"forkd.dev/forkd/internal/errdefs"
)

// The ioctls of linux/kvm.h that the probe uses; TestKVMConstants compares all
// numbers and offsets with the installed header.
const (
	kvmGetAPIVersion       = 0xae00
	kvmCreateVM            = 0xae01
	kvmGetVCPUMmapSize     = 0xae04
	kvmCreateVCPU          = 0xae41
	kvmSetUserMemoryRegion = 0x4020ae46
	kvmRun                 = 0xae80
	kvmGetRegs             = 0x8090ae81
	kvmSetRegs             = 0x4090ae82
	kvmGetSregs            = 0x8138ae83
	kvmSetSregs            = 0x4138ae84
	kvmGetTSCkHz           = 0xaea3

	kvmAPIVersion = 12
	kvmExitHLT    = 5
)

// kvmRegs is struct kvm_regs.
type kvmRegs struct {
	RAX, RBX, RCX, RDX, RSI, RDI, RSP, RBP uint64
	R8, R9, R10, R11, R12, R13, R14, R15   uint64
	RIP, RFLAGS                            uint64
}

// kvmSegment is struct kvm_segment.
type kvmSegment struct {
	Base                         uint64
	Limit                        uint32
	Selector                     uint16
	Type, Present, DPL, DB, S, L uint8
	G, AVL, Unusable, padding    uint8
}

// kvmTable is struct kvm_dtable.
type kvmTable struct {
	Base    uint64
	Limit   uint16
	padding [3]uint16
}

// kvmSregs is struct kvm_sregs.
type kvmSregs struct {
	CS, DS, ES, FS, GS, SS, TR, LDT kvmSegment
	GDT, IDT                        kvmTable
	CR0, CR2, CR3, CR4, CR8         uint64
	EFER, APICBase                  uint64
	InterruptBitmap                 [4]uint64
}

// kvmMemoryRegion is struct kvm_userspace_memory_region.
type kvmMemoryRegion struct {
	Slot, Flags                       uint32
	GuestAddress, Size, UserspaceAddr uint64
}

// throwawayVM is a VM with one page of memory and one vCPU. It belongs to one
// goroutine, which is locked to its thread while it runs the vCPU.
type throwawayVM struct {
	vm, vcpu int
	memory   []byte
	run      []byte // struct kvm_run
}

// Layout of struct kvm_run as far as it is used.
const (
	kvmRunImmediateExit = 1 // byte; bytes 0 and 2-7 are an input of 0 and padding
	kvmRunExitReason    = 8
	kvmRunMinSize       = 4096
)

func openThrowawayVM() (vm *throwawayVM, err error) {
	dev, err := retryEINTR(func() (int, error) { return unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, fmt.Errorf("open /dev/kvm: %w", classify(err))
	}
	defer unix.Close(dev)
	if v, err := kvmIoctl(dev, kvmGetAPIVersion); err != nil || v != kvmAPIVersion {
		return nil, errdefs.New(errdefs.ErrUnsupported, "KVM has API version %d, want %d (%v)", v, kvmAPIVersion, err)
	}
	size, err := kvmIoctl(dev, kvmGetVCPUMmapSize)
	if err != nil {
		return nil, fmt.Errorf("KVM_GET_VCPU_MMAP_SIZE: %w", classify(err))
	}
	if size < kvmRunMinSize || size > 1<<20 {
		return nil, errdefs.New(errdefs.ErrUnsupported, "KVM shares %d bytes per vCPU", size)
	}
	vm = &throwawayVM{vm: -1, vcpu: -1}
	defer func() {
		if err != nil {
			vm.close()
		}
	}()
	if vm.vm, err = kvmIoctl(dev, kvmCreateVM); err != nil {
		return nil, fmt.Errorf("KVM_CREATE_VM: %w", classify(err))
	}
	if err := vm.addMemory(); err != nil {
		return nil, err
	}
	if vm.vcpu, err = kvmIoctl(vm.vm, kvmCreateVCPU); err != nil {
		return nil, fmt.Errorf("KVM_CREATE_VCPU: %w", classify(err))
	}
	if vm.run, err = unix.Mmap(vm.vcpu, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map vCPU state: %w", classify(err))
	}
	return vm, nil
}

// addMemory gives the VM one page at guest address 0. It comes before anything
// else: a memory slot set up later can cost milliseconds.
func (vm *throwawayVM) addMemory() (err error) {
	vm.memory, err = unix.Mmap(-1, 0, PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map guest memory: %w", classify(err))
	}
	region := kvmMemoryRegion{
		Size: PageSize,
		// SAFETY: the page is mmap memory outside of Go's heap: it does not move, and
		// close unmaps it only after the VM is gone.
		UserspaceAddr: uint64(uintptr(unsafe.Pointer(&vm.memory[0]))),
	}
	// SAFETY: region lives until the call returns, the kernel copies it.
	if err := kvmIoctlPtr(vm.vm, kvmSetUserMemoryRegion, unsafe.Pointer(&region)); err != nil {
		return fmt.Errorf("KVM_SET_USER_MEMORY_REGION: %w", classify(err))
	}
	return nil
}

func (vm *throwawayVM) close() {
	if vm.run != nil {
		_ = unix.Munmap(vm.run)
	}
	for _, fd := range []int{vm.vcpu, vm.vm} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	if vm.memory != nil {
		_ = unix.Munmap(vm.memory)
	}
}

// load puts code at address 0 and the vCPU into 32-bit flat protected mode at
// privilege level 0, without paging, with ECX = count.
func (vm *throwawayVM) load(code []byte, count uint32) error {
	copy(vm.memory, code)
	var sregs kvmSregs
	// SAFETY (this and the two calls below): the struct has the kernel's size and
	// layout (TestKVMConstants) and lives until the call returns.
	if err := kvmIoctlPtr(vm.vcpu, kvmGetSregs, unsafe.Pointer(&sregs)); err != nil {
		return fmt.Errorf("KVM_GET_SREGS: %w", classify(err))
	}
	const (
		codeSegment, dataSegment = 0xb, 0x3 // accessed + execute/read, read/write
		protectedMode            = 1
	)
	flat := kvmSegment{Limit: 0xffffffff, Selector: 0x10, Type: dataSegment, Present: 1, DB: 1, S: 1, G: 1}
	sregs.DS, sregs.ES, sregs.FS, sregs.GS, sregs.SS = flat, flat, flat, flat, flat
	sregs.CS = flat
	sregs.CS.Selector, sregs.CS.Type = 0x8, codeSegment
	sregs.CR0 |= protectedMode
	if err := kvmIoctlPtr(vm.vcpu, kvmSetSregs, unsafe.Pointer(&sregs)); err != nil {
		return fmt.Errorf("KVM_SET_SREGS: %w", classify(err))
	}
	const reservedFlag = 2
	regs := kvmRegs{RCX: uint64(count), RFLAGS: reservedFlag}
	if err := kvmIoctlPtr(vm.vcpu, kvmSetRegs, unsafe.Pointer(&regs)); err != nil {
		return fmt.Errorf("KVM_SET_REGS: %w", classify(err))
	}
	return nil
}

// runFor runs the vCPU until it halts or the time is over, or ctx is.
// It returns what is left in ECX and the processor time it took: on a busy host
// most of the wall time can belong to others.
func (vm *throwawayVM) runFor(ctx context.Context, limit time.Duration) (left uint32, took time.Duration, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	stopKick := vm.kickAfter(ctx, limit, unix.Gettid())
	defer stopKick()
	start, used := time.Now(), threadTime()
	halted := false
	for !halted && ctx.Err() == nil && time.Since(start) < limit {
		_, err := kvmIoctlOnce(vm.vcpu, kvmRun)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return 0, 0, fmt.Errorf("KVM_RUN: %w", classify(err))
		}
		if reason := binary.LittleEndian.Uint32(vm.run[kvmRunExitReason:]); reason != kvmExitHLT {
			return 0, 0, errdefs.New(errdefs.ErrUnsupported, "KVM_RUN ended with exit reason %d, want a halt", reason)
		}
		halted = true
	}
	took = threadTime() - used
	if ctx.Err() != nil {
		return 0, 0, ctx.Err()
	}
	var regs kvmRegs
	// SAFETY: as in load.
	if err := kvmIoctlPtr(vm.vcpu, kvmGetRegs, unsafe.Pointer(&regs)); err != nil {
		return 0, 0, fmt.Errorf("KVM_GET_REGS: %w", classify(err))
	}
	return uint32(regs.RCX), took, nil
}

// threadTime returns the processor time of this thread; it counts time in the guest.
func threadTime() time.Duration {
	var ts unix.Timespec
	// Cannot fail: the clock exists since Linux 2.6.12 and the address is good.
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano())
}

// kickAfter takes thread tid out of KVM_RUN when the time is over or ctx ends.
// The returned function joins the kicker.
func (vm *throwawayVM) kickAfter(ctx context.Context, limit time.Duration, tid int) (stop func()) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	done, halt := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-halt:
		case <-ctx.Done():
			// SAFETY: the mapping is page-aligned, lives until close and is written by
			// nobody else; the 4 bytes are one input byte (0), immediate_exit and
			// padding. An entry after this store returns at once.
			atomic.StoreUint32((*uint32)(unsafe.Pointer(&vm.run[0])), 1<<(8*kvmRunImmediateExit))
			// SIGURG is the one signal for which Go's runtime always has a handler.
			_ = unix.Tgkill(unix.Getpid(), tid, unix.SIGURG)
		}
	}()
	return func() {
		close(halt)
		<-done
		cancel()
	}
}

// tscKHz returns the rate at which the vCPU's time stamp counter runs: the host's,
// since nothing scaled it.
func (vm *throwawayVM) tscKHz() (uint64, error) {
	khz, err := kvmIoctl(vm.vcpu, kvmGetTSCkHz)
	if err != nil {
		return 0, fmt.Errorf("KVM_GET_TSC_KHZ: %w", classify(err))
	}
	if khz <= 0 {
		return 0, errdefs.New(errdefs.ErrUnsupported, "KVM_GET_TSC_KHZ: KVM does not know the rate")
	}
	return uint64(khz), nil
}

// kvmIoctl makes a request that takes no argument.
func kvmIoctl(fd int, request uintptr) (int, error) {
	return retryEINTR(func() (int, error) { return kvmIoctlOnce(fd, request) })
}

// kvmIoctlOnce uses Syscall, never RawSyscall: KVM_RUN would block the garbage
// collector for as long as the guest runs.
func kvmIoctlOnce(fd int, request uintptr) (int, error) {
	v, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, 0)
	if errno != 0 {
		return -1, errno
	}
	return int(v), nil
}

// kvmIoctlPtr is kvmIoctl for requests that take the address of a struct.
func kvmIoctlPtr(fd int, request uintptr, arg unsafe.Pointer) error {
	_, err := retryEINTR(func() (int, error) {
		// SAFETY: the conversion stands in the call, as package unsafe demands.
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
		if errno != 0 {
			return -1, errno
		}
		return 0, nil
	})
	return err
}
