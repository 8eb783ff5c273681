package linux

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"forkd.dev/forkd/internal/errdefs"
)

// FastKernelMIPS is the least speed at which kernel code in a KVM guest counts as
// run by the processor. Hosts that emulate it measured about 1.4 million
// instructions a second (kvm_pvm, one software step per instruction); hardware
// virtualization runs the probe's two-instruction loop at thousands, nested
// virtualization included. 50 is far from both.
const FastKernelMIPS = 50

// kvmProbeTime bounds how long the probe's guest runs.
const kvmProbeTime = 100 * time.Millisecond

// KVMSpeed is how fast KVM runs supervisor-mode code.
type KVMSpeed struct {
	Instructions uint64
	Took         time.Duration // processor time
}

// MIPS returns millions of instructions per second.
func (s KVMSpeed) MIPS() float64 {
	if s.Took <= 0 {
		return 0
	}
	return float64(s.Instructions) / s.Took.Seconds() / 1e6
}

// Fast tells whether the processor itself runs kernel code.
func (s KVMSpeed) Fast() bool { return s.MIPS() >= FastKernelMIPS }

func (s KVMSpeed) String() string {
	how := "emulated"
	if s.Fast() {
		how = "run by the processor"
	}
	return fmt.Sprintf("/dev/kvm runs kernel code at %.3g million instructions/s: %s", s.MIPS(), how)
}

// KVMProbe creates a throw-away VM and lets it count down in supervisor mode for
// at most a tenth of a second. A /dev/kvm that opens proves little: some hosts
// run only user code natively and emulate every kernel instruction.
//
// ErrNotFound: there is no /dev/kvm. ErrPermission: it may not be opened.
// ErrUnsupported: it does not run plain 32-bit supervisor code.
func KVMProbe(ctx context.Context) (KVMSpeed, error) {
	speed, err := kvmProbe(ctx)
	if err != nil {
		return KVMSpeed{}, hintKVM(fmt.Errorf("probe KVM: %w", err))
	}
	return speed, nil
}

func kvmProbe(ctx context.Context) (KVMSpeed, error) {
	if err := ctx.Err(); err != nil {
		return KVMSpeed{}, err
	}
	vm, err := openThrowawayVM()
	if err != nil {
		return KVMSpeed{}, err
	}
	defer vm.close()
	const (
		count            = math.MaxUint32 // more than fits into the time at any speed
		instructionsEach = 2
	)
	code := []byte{
		0x49,       // dec ecx
		0x75, 0xfd, // jnz -3
		0xf4, // hlt
	}
	if err := vm.load(code, count); err != nil {
		return KVMSpeed{}, err
	}
	left, took, err := vm.runFor(ctx, kvmProbeTime)
	if err != nil {
		return KVMSpeed{}, err
	}
	speed := KVMSpeed{Instructions: uint64(count-left) * instructionsEach, Took: took}
	if speed.Instructions == 0 {
		return KVMSpeed{}, errdefs.New(errdefs.ErrUnsupported, "the guest did not run one instruction in %v", took.Round(time.Millisecond))
	}
	return speed, nil
}

func hintKVM(err error) error {
	switch {
	case errors.Is(err, errdefs.ErrNotFound):
		return errdefs.WithHint(err, "enable virtualization in the firmware (or nested virtualization of the host) and load kvm_intel or kvm_amd")
	case errors.Is(err, errdefs.ErrPermission):
		return errdefs.WithHint(err, "join the group that owns /dev/kvm: sudo usermod -aG kvm $USER, then log in again")
	}
	return err
}

// HoldVM makes a virtual machine that never runs and lives as long as this process.
func HoldVM() error {
	_, err := openThrowawayVM()
	return err
}
